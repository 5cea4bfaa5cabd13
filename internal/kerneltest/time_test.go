//go:build linux

package kerneltest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// A server whose clocks are shifted by 60 days: what is said of it is by the kernel's own, as of all others.
func TestAServerInATimeNamespaceIsMeasuredByTheKernelsClock(t *testing.T) {
	requireRoot(t)
	if _, err := os.Stat("/proc/self/ns/time"); err != nil {
		t.Skip("needs CONFIG_TIME_NS: ", err)
	}
	binary, err := compileSockets()
	require.NoError(t, err)
	const days60 = "5184000"
	s := start(t, func(port string) *exec.Cmd {
		return exec.Command("unshare", "--time", "--monotonic", days60, "--boottime", days60, "--fork", "--kill-child", binary, "plain", port)
	})
	s.file = binary
	w := observe(t, probe.Config{}, s)
	w.trackChildren(s)
	require.Len(t, s.children(), 1)
	offsets, err := os.ReadFile(fmt.Sprintf("/proc/%d/timens_offsets", s.children()[0]))
	require.NoError(t, err)
	require.Contains(t, string(bytes.Join(bytes.Fields(offsets), []byte(" "))), "monotonic "+days60+" 0")
	before := probe.Now()
	exchange(t, dial(t, "tcp4", s.addr), "/sleep?60")
	after := probe.Now()
	r := &w.wait(1)[0]
	requireWhole(t, r)
	assert.Greater(t, r.Start, before)
	assert.Less(t, r.End, after)
	assert.Equal(t, "wait", top(r, stage.Wait).String(), describe(r))
	assert.InDelta(t, after-before, r.End-r.Start, float64(30*ms), describe(r))
}

// The one comparison that the kernel side makes with a clock of 32 bits, at the times at which that goes round. The C
// code itself, compiled for this machine, since the clock of a running kernel cannot be set.
func TestTimeStampsOfAMachineThatIsUpForMonths(t *testing.T) {
	dir := t.TempDir()
	header, err := filepath.Abs("../../bpf/echo.h")
	require.NoError(t, err)
	source := `#include <linux/types.h>
#include <stdio.h>
#include "` + header + `"
int main(void)
{
	unsigned long long stamp, sent;
	while (scanf("%llu %llu", &stamp, &sent) == 2)
		printf("%d\n", echoed_before((__u32)stamp, sent));
	return 0;
}
`
	require.NoError(t, os.WriteFile(dir+"/echo.c", []byte(source), 0o600))
	out, err := exec.CommandContext(t.Context(), "gcc", "-Wall", "-Werror", "-o", dir+"/echo", dir+"/echo.c").CombinedOutput()
	require.NoError(t, err, "%s", out)

	const day = int64(24 * time.Hour / time.Millisecond)
	ups := map[string]int64{ // ms
		"a minute": 60_000, "24.8 days": 1 << 31, "49.7 days": 1 << 32, "74.6 days": 3 << 31, "99.4 days": 1 << 33, "ten years": 3650 * day,
	}
	var in bytes.Buffer
	var names []string
	var want []string
	for name, up := range ups {
		for _, round := range []int64{-2000, -2, -1, 0, 1, 2, 2000} { // the sending, around the turn
			sent := up + round
			for _, c := range []struct {
				earlier int64 // ms: the stamp, before the sending
				before  string
			}{{30_000, "1"}, {200, "1"}, {2, "1"}, {1, "0"}, {0, "0"}, {-1, "0"}, {-30_000, "0"}, {3_700_000, "0"}, {-3_700_000, "0"}} {
				if sent < c.earlier && name == "a minute" {
					continue // before it was started
				}
				fmt.Fprintf(&in, "%d %d\n", sent-c.earlier, sent*int64(time.Millisecond)+999_999)
				names = append(names, fmt.Sprintf("up for %s %+d ms, stamped %d ms before", name, round, c.earlier))
				want = append(want, c.before)
			}
		}
	}
	cmd := exec.CommandContext(t.Context(), dir+"/echo")
	cmd.Stdin = &in
	answers, err := cmd.Output()
	require.NoError(t, err)
	got := bytes.Fields(answers)
	require.Len(t, got, len(want))
	for i := range want {
		assert.Equal(t, want[i], string(got[i]), names[i])
	}
}
