//go:build linux

package probe

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/ebpfllm/ebpfllm/bpf"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

func TestEveryProgramHasAHookAndEveryStageItsPrograms(t *testing.T) {
	spec, err := bpf.LoadKernel()
	assert.NoError(t, err)
	known := map[string]bool{"track_threads": true} // the iterator, run and not attached
	for _, h := range hooks {
		assert.Contains(t, spec.Programs, h.program)
		assert.True(t, h.after == "" || known[h.after], "what ends a state is attached before %s begins it", h.program)
		known[h.program] = true
	}
	for name := range spec.Programs {
		assert.True(t, known[name], "%s is attached nowhere", name)
	}
	for _, s := range stage.All() {
		assert.Equal(t, s != stage.Unattributed, len(needs[s]) > 0, s)
		for _, p := range append(needs[s], helpful[s]...) {
			assert.True(t, known[p], "%s needs %s", s, p)
		}
	}
}

func TestTheReportSaysWhyAndWhatIsLeft(t *testing.T) {
	failed := map[string]error{"page_fault_user": errors.New("no such tracepoint"), "contention_begin": errors.New("no contention")}
	got := map[stage.Stage]StageReport{}
	for _, r := range report([]stage.Stage{stage.Qdisc}, failed) {
		got[r.Stage] = r
	}
	assert.Len(t, got, stage.Count-2)
	assert.Equal(t, StageReport{Stage: stage.PageFault, Reason: "no such tracepoint"}, got[stage.PageFault])
	assert.Equal(t, StageReport{Stage: stage.Qdisc, Reason: "disabled in the configuration"}, got[stage.Qdisc])
	assert.True(t, got[stage.Lock].Available)
	assert.Equal(t, "in part: no contention", got[stage.Lock].Reason)
	assert.Equal(t, "tp_btf/sched_switch + tp_btf/sched_waking", got[stage.Syscall].Hook)
}

func TestHooksOfDisabledStagesAreNotUsed(t *testing.T) {
	var threads []stage.Stage
	for _, s := range stage.All() {
		if !s.Socket() {
			threads = append(threads, s)
		}
	}
	for _, h := range wanted(threads) {
		assert.NotContains(t, []string{"sched_switch", "sched_waking", "page_fault_user", "contention_begin"}, h.program)
	}
	assert.Len(t, wanted(nil), len(hooks))
}
