package stage_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/ebpfllm/ebpfllm/bpf"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

func TestTheKernelCountsByTheSameNumbers(t *testing.T) {
	for s, k := range map[stage.Stage]bpf.KernelStage{
		stage.Unknown: bpf.KernelStageSTAGE_UNKNOWN, stage.CPU: bpf.KernelStageSTAGE_CPU,
		stage.RunQueue: bpf.KernelStageSTAGE_RUN_QUEUE, stage.Throttled: bpf.KernelStageSTAGE_THROTTLED,
		stage.PageFault: bpf.KernelStageSTAGE_PAGE_FAULT, stage.PageCache: bpf.KernelStageSTAGE_PAGE_CACHE,
		stage.Reclaim: bpf.KernelStageSTAGE_RECLAIM, stage.Compaction: bpf.KernelStageSTAGE_COMPACTION,
		stage.BlockIO: bpf.KernelStageSTAGE_BLOCK_IO, stage.Lock: bpf.KernelStageSTAGE_LOCK,
		stage.Syscall: bpf.KernelStageSTAGE_SYSCALL, stage.Stopped: bpf.KernelStageSTAGE_STOPPED,
		stage.Wait: bpf.KernelStageSTAGE_WAIT, stage.AcceptQueue: bpf.KernelStageSTAGE_ACCEPT_QUEUE,
		stage.RequestBody: bpf.KernelStageSTAGE_REQUEST_BODY, stage.ReceiveQueue: bpf.KernelStageSTAGE_RECEIVE_QUEUE,
		stage.SendBuffer: bpf.KernelStageSTAGE_SEND_BUFFER, stage.Qdisc: bpf.KernelStageSTAGE_QDISC,
		stage.Retransmit: bpf.KernelStageSTAGE_RETRANSMIT, stage.Unattributed: bpf.KernelStageSTAGE_COUNT,
	} {
		assert.EqualValues(t, k, s, s)
	}
}

func TestEveryStageHasANameOfItsOwn(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range stage.All() {
		name := s.String()
		assert.False(t, seen[name], name)
		assert.Equal(t, strings.ToLower(name), name)
		seen[name] = true
		parsed, ok := stage.Parse(name)
		assert.True(t, ok, name)
		assert.Equal(t, s, parsed)
	}
	assert.Len(t, seen, stage.Count-1)
	for _, name := range []string{"", "unknown", "CPU", "disk"} {
		_, ok := stage.Parse(name)
		assert.False(t, ok, name)
	}
	assert.Equal(t, "unknown", stage.Stage(200).String())
}

func TestPrecedenceRanksEveryStageButTheRest(t *testing.T) {
	assert.ElementsMatch(t, append(slices.Clip(stage.Precedence), stage.Unattributed), stage.All())
}

func TestWhatIsLeftOverIsNoStall(t *testing.T) {
	for _, s := range stage.All() {
		left := s == stage.CPU || s == stage.Wait || s == stage.Unattributed
		assert.Equal(t, !left, s.Stall(), s)
	}
	assert.False(t, stage.Unknown.Stall())
	assert.False(t, stage.Stage(200).Stall())
}
