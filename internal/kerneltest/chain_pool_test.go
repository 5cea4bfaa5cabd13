//go:build linux

package kerneltest

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// A request waits for one thread of a pool after the other, for more of them than the
// serving thread remembers: all of them are its waiting's reason.
func TestAWaitForMoreThreadsThanAreRememberedIsSplitAsAWhole(t *testing.T) {
	requireRoot(t)
	const turns, each = 60, 2 * ms
	s := startC(t, false)
	w := observe(t, probe.Config{}, s)
	s.get("/turns?6") // each of them has been off a CPU since it is watched
	s.get(fmt.Sprintf("/turns?%d", turns))
	r := &w.wait(2)[1]
	requireWhole(t, r)
	got := r.Waker[stage.CPU] + r.Waker[stage.RunQueue] // they look at the clock, and the machine is shared
	assert.GreaterOrEqual(t, float64(got), tolerance*float64(turns*each), describe(r))
	wall := float64(r.End - r.Start)
	require.Less(t, float64(r.Exclusive[stage.Wait]+r.Exclusive[stage.Unattributed]), 0.1*wall+float64(2*ms), describe(r))
}
