//go:build linux

package kerneltest

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/probe"
)

// One probe for all of the faults: loading the programs is what takes long where
// the machine is emulated. How long a stage takes says nothing there, which one it is does.
func TestOneProbeNamesEachFault(t *testing.T) {
	requireRoot(t)
	s := startC(t, false)
	// a fault of a page takes longer than a millisecond there: there would be more occurrences than a request may have
	w := observe(t, probe.Config{MinDuration: 50 * time.Millisecond}, s)
	s.get("/")
	for i, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			s.t, w.t = t, t
			if f.cause != nil {
				defer f.cause(t, s)()
			}
			s.get(f.path)
			r := &w.wait(i + 2)[i+1]
			requireWhole(t, r)
			assert.Equal(t, f.want.String(), top(r, f.want).String(), describe(r))
			assert.GreaterOrEqual(t, float64(r.Exclusive[f.want]), tolerance*float64(f.least), describe(r))
		})
		s.t, w.t = t, t
	}
}

// A file goes from the page cache to the socket without passing the server's memory: up to 6.4 by another
// function of the kernel than what is written.
func TestAFileThatIsSentByTheKernelIsTheResponse(t *testing.T) {
	requireRoot(t)
	s := startGo(t)
	w := observe(t, probe.Config{}, s)
	s.get("/file")
	s.get("/")
	list := w.wait(2)
	for i, path := range []string{"/file", "/"} {
		requireWhole(t, &list[i]) // all that its Content-Length says was seen to leave
		assert.Equal(t, path, list[i].Head.Path)
		assert.Equal(t, 200, list[i].Status)
	}
}

// Each is tracked from its beginning, since its parent is, and forgotten at its end.
func TestTenThousandProcessesLeaveNothingBehind(t *testing.T) {
	requireRoot(t)
	const processes, each = 10_000, 500
	s := startC(t, false)
	w := observe(t, probe.Config{RingBytes: 8 << 20}, s) // room for a record of each beginning and end, however late the reader is
	files := openFiles(t)
	for range processes / each {
		s.get(fmt.Sprintf("/spawn?%d", each))
	}
	var c probe.Counters
	require.Eventually(t, func() bool {
		var err error
		c, err = w.probe.Counters()
		require.NoError(t, err)
		return c.Sent["process"] >= 2*processes && c.Records["process"]+c.Lost["ring_full_process"] == c.Sent["process"] && c.Targets == 1
	}, 30*time.Second, 20*time.Millisecond, "%+v", &c)
	assert.Zero(t, c.Lost["ring_full_process"])
	for name, n := range c.MapFull {
		assert.Zero(t, n, name)
	}
	assert.Equal(t, files, openFiles(t))
	s.get("/")
	list := w.wait(processes/each + 1)
	for i := range list {
		requireWhole(t, &list[i])
	}
}
