//go:build linux && amd64

package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/scenarios"
)

func TestEveryScenarioIsWellFormedAndHasANameOfItsOwn(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range scenarios.All() {
		require.NoError(t, s.Validate())
		assert.False(t, seen[s.Name], s.Name)
		seen[s.Name] = true
	}
}

// The short list, on the real kernel. How far latencies are off is for `make truth`
// on a quiet machine: here the stage has to be named for most requests, so that a
// mistake is told from the noise of a shared machine.
func TestTheReceiverNamesInjectedFaults(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads programs into the kernel")
	}
	l, err := lab.New(lab.Quick, t.Output())
	require.NoError(t, err)
	chosen, err := choose("", true)
	require.NoError(t, err)
	for _, s := range chosen {
		t.Run(s.Name, func(t *testing.T) {
			r := l.Run(t.Context(), s)
			if r.Skipped != "" {
				t.Skip(r.Skipped)
			}
			require.Empty(t, r.Error)
			if s.Invisible != "" {
				return
			}
			assert.Zero(t, r.Lost)
			assert.Zero(t, r.Missing)
			if s.Control {
				assert.LessOrEqual(t, r.Blamed, r.Affected/10, "%+v", r)
			}
			assert.GreaterOrEqual(t, r.Right, r.Affected*8/10, "%+v", r)
			assert.LessOrEqual(t, r.FalseBlame, r.Unaffected/10, "%+v", r)
		})
	}
}
