package rootcause

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

func TestEveryStageHasItsOwnInferredCauseAndAdvice(t *testing.T) {
	seen := map[string]stage.Stage{}
	for _, s := range stage.All() {
		f := Explain(Evidence{Stage: s, Excess: 1})
		assert.True(t, strings.HasPrefix(f.Cause, "Inferred: "), "%s: %s", s, f.Cause)
		assert.NotEmpty(t, f.Recommendation, s)
		assert.NotContains(t, f.Cause, "own span", "%s falls through to the rule for application spans", s)
		if other, ok := seen[f.Cause]; ok {
			t.Errorf("%s and %s have the same cause", s, other)
		}
		seen[f.Cause] = s
	}
}

func TestEvidenceRefinesTheCause(t *testing.T) {
	tests := []struct {
		name   string
		e      Evidence
		cause  string
		advice string
	}{
		{"major faults mean evicted weights", Evidence{Stage: stage.PageFault, Excess: 1, Major: 0.6}, "weights", "mlock"},
		{"few major faults do not", Evidence{Stage: stage.PageFault, Excess: 1, Major: 0.4}, "first touch", "warm-up"},
		{"no excess and no faults do not", Evidence{Stage: stage.PageFault}, "first touch", "warm-up"},
		{"the system call is named", Evidence{Stage: stage.Syscall, Syscall: "ioctl"}, "the system call ioctl", "serving thread"},
		{"a file lock is told from a futex", Evidence{Stage: stage.Lock, Syscall: "flock"}, "a lock in flock", "holder"},
		{"sharing is told", Evidence{Stage: stage.RunQueue, SharedBy: 7}, "shared by 7 requests", "OMP_NUM_THREADS"},
		{"the thread that was waited for is named", Evidence{Stage: stage.Lock, Excess: 1, Waker: 0.9, WakerPID: 70, WakerTID: 71}, "thread 71 of process 70", "holder"},
		{"or told of without a name", Evidence{Stage: stage.CPU, Excess: 1, Waker: 0.9}, "one that this thread waited for", "CPU profile"},
		{"throttling points to cpu.max", Evidence{Stage: stage.Throttled}, "quota", "cpu.max"},
		{"reclaim is told from the faults it happens in", Evidence{Stage: stage.Reclaim}, "had to free some itself", "memory.max"},
		{"compaction points to transparent huge pages", Evidence{Stage: stage.Compaction}, "huge page", "defrag"},
		{"a retransmission is the network's", Evidence{Stage: stage.Retransmit}, "sent again", "loss on the path"},
		{"a span without kernel stages is named", Evidence{Span: "decode"}, `"decode"`, "receiver"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := Explain(tt.e)
			assert.Contains(t, f.Cause, tt.cause)
			assert.Contains(t, f.Recommendation, tt.advice)
		})
	}
}

func TestAThreadThatHadLittleShareIsNotNamed(t *testing.T) {
	f := Explain(Evidence{Stage: stage.Lock, Excess: 1, Waker: 0.4, WakerPID: 70, WakerTID: 71})
	assert.NotContains(t, f.Cause, "thread 71")
}
