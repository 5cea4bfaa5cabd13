//go:build linux

package probe

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMemoryIsBalancedOnlyBetweenNodesAndIfTurnedOn(t *testing.T) {
	for _, c := range []struct {
		balancing, nodes string
		want             bool
	}{
		{"1\n", "0-1\n", true},
		{"2\n", "0,2\n", true},
		{"0\n", "0-1\n", false},
		{"1\n", "0\n", false},
		{"1\n", "junk\n", false},
		{"", "0-1\n", false}, // a kernel without
	} {
		root := t.TempDir()
		write := func(name, value string) {
			if value == "" {
				return
			}
			require.NoError(t, os.MkdirAll(filepath.Dir(root+name), 0o755))
			require.NoError(t, os.WriteFile(root+name, []byte(value), 0o600))
		}
		write("/proc/sys/kernel/numa_balancing", c.balancing)
		write("/sys/devices/system/node/online", c.nodes)
		assert.Equal(t, c.want, balancesNUMA(root), "%+v", c)
	}
}
