//go:build linux

package probe

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/bpf"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

func TestEveryProgramHasAHookAndEveryStageItsHooks(t *testing.T) {
	spec, err := bpf.LoadKernel()
	require.NoError(t, err)
	attached := map[string]bool{"track_threads": true} // the iterator, run and not attached
	known := map[string]bool{}
	for _, h := range hooks {
		assert.NotEmpty(t, h.ways, h.name)
		for _, w := range h.ways {
			assert.Contains(t, spec.Programs, w.program)
			assert.False(t, attached[w.program], w.program)
			attached[w.program] = true
			if w.kind != event {
				assert.Equal(t, w.String(), spec.Programs[w.program].SectionName)
			}
		}
		assert.True(t, h.after == "" || known[h.after], "what ends a state is attached before %s begins it", h.name)
		known[h.name] = true
	}
	for name := range spec.Programs {
		assert.True(t, attached[name], "%s is attached nowhere", name)
	}
	for _, s := range stage.All() {
		assert.Equal(t, s != stage.Unattributed, len(needs[s]) > 0, s)
		for _, n := range append(needs[s], helpful[s]...) {
			assert.True(t, known[n], "%s needs %s", s, n)
		}
	}
}

func TestTheReportSaysWhyAndWhatIsLeft(t *testing.T) {
	chosen := map[string]choice{}
	for _, h := range hooks {
		chosen[h.name] = choice{way: &h.ways[len(h.ways)-1]}
	}
	chosen["page_fault_user"] = choice{err: errors.New("no such tracepoint")}
	chosen["contention_begin"] = choice{err: errors.New("no contention")}
	data := chosen["data_ready"]
	data.refused = []error{errors.New("tp_btf/sk_data_ready: too old")}
	chosen["data_ready"] = data
	got := map[stage.Stage]StageReport{}
	for _, r := range report([]stage.Stage{stage.Qdisc}, chosen) {
		got[r.Stage] = r
	}
	assert.Len(t, got, stage.Count-2)
	assert.Equal(t, StageReport{Stage: stage.PageFault, Reason: "no such tracepoint"}, got[stage.PageFault])
	assert.Equal(t, StageReport{Stage: stage.Qdisc, Reason: "disabled in the configuration"}, got[stage.Qdisc])
	assert.True(t, got[stage.Lock].Available)
	assert.Equal(t, "in part: no contention", got[stage.Lock].Reason)
	assert.Equal(t, "tp_btf/sched_switch + tp_btf/sched_waking", got[stage.Syscall].Hook)
	assert.True(t, got[stage.ReceiveQueue].Available)
	assert.Contains(t, got[stage.ReceiveQueue].Hook, "fentry/sock_def_readable")
	assert.Equal(t, "tp_btf/sk_data_ready: too old", got[stage.ReceiveQueue].Reason, "why it is not the better hook")
}

func TestHooksOfDisabledStagesAreNotUsed(t *testing.T) {
	var threads []stage.Stage
	for _, s := range stage.All() {
		if !s.Socket() {
			threads = append(threads, s)
		}
	}
	for _, h := range wanted(threads) {
		assert.NotContains(t, []string{"sched_switch", "sched_waking", "page_fault_user", "contention_begin"}, h.name)
	}
	assert.Len(t, wanted(nil), len(hooks))
}
