//go:build linux && amd64

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
	l, err := lab.New(t.Context(), lab.Quick, t.Output())
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
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

// What the page says can be put to the lab is put to it as it stands there. Bars are for
// `make truth`: here the case has to be run to its end, and to be written down.
func TestTheDocumentedCommandsWork(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads programs into the kernel")
	}
	page, err := os.ReadFile("../../docs/accuracy.md")
	require.NoError(t, err)
	program := filepath.Join(t.TempDir(), "truthlab")
	b, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput()
	require.NoError(t, err, "%s", b)
	cases := 0
	for line := range strings.Lines(string(page)) {
		arguments, found := strings.CutPrefix(strings.TrimSpace(line), "$ sudo go run ./internal/truthlab ")
		if !found {
			continue
		}
		cases++
		t.Run(arguments, func(t *testing.T) {
			out := t.TempDir()
			cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", program+" "+arguments+" -quick -out "+out)
			cmd.Dir = "../.."
			b, _ := cmd.CombinedOutput() // fails where a bar is missed, too
			report, err := lab.ReadReport(filepath.Join(out, "own.json"))
			require.NoError(t, err, "%s", b)
			require.Len(t, report.Scenarios, 1)
			require.Empty(t, report.Scenarios[0].Error, "%s", b)
			assert.GreaterOrEqual(t, report.Scenarios[0].Right, report.Scenarios[0].Affected*8/10, "%s", b)
			assert.FileExists(t, filepath.Join(out, "own.svg"))
		})
	}
	assert.GreaterOrEqual(t, cases, 2)
}

func TestAWholeRunIsOverWithinSeventyMinutes(t *testing.T) {
	var all time.Duration
	for _, s := range scenarios.All() {
		all += s.Estimate(lab.Full)
		assert.Greater(t, s.Estimate(lab.Full), s.Estimate(lab.Quick), s.Name)
	}
	assert.Less(t, all, 70*time.Minute)
}
