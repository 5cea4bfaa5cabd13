//go:build linux

package kerneltest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// kernelRelease is the running kernel's version, as 1000 × major + minor.
func kernelRelease(t *testing.T) int {
	t.Helper()
	var name unix.Utsname
	require.NoError(t, unix.Uname(&name))
	var major, minor int
	_, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor)
	require.NoError(t, err)
	return 1000*major + minor
}

// Which hook a kernel is to be measured by, that it may not silently be another:
// of each pair the first from that version on, and the second before it.
var hooksByVersion = []struct {
	since          int
	better, lesser string
}{
	{6016, "tp_btf/tcp_sendmsg_locked", "fentry/tcp_sendmsg_locked"},
	{6003, "tp_btf/sock_send_length", "fexit/tcp_sendmsg"},
	{6003, "tp_btf/sock_recv_length", "fexit/tcp_recvmsg"},
	{6003, "tp_btf/sk_data_ready", "fentry/sock_def_readable"},
}

// And by which whatever the version is.
var hooksEverywhere = map[stage.Stage]string{
	stage.CPU:          "tp_btf/sched_switch + tp_btf/sched_waking",
	stage.RunQueue:     "tp_btf/sched_switch + tp_btf/sched_waking + tp_btf/softirq_raise + tp_btf/softirq_entry",
	stage.Throttled:    "tp_btf/sched_switch + tp_btf/sched_waking",
	stage.PageFault:    "tp_btf/sched_switch + tp_btf/sched_waking + tp_btf/page_fault_user + perf_event/page_fault_minor + perf_event/page_fault_major + tp_btf/page_fault_kernel",
	stage.Reclaim:      "tp_btf/sched_switch + tp_btf/sched_waking + tp_btf/mm_vmscan_direct_reclaim_begin + tp_btf/mm_vmscan_direct_reclaim_end + tp_btf/mm_vmscan_memcg_reclaim_begin + tp_btf/mm_vmscan_memcg_reclaim_end",
	stage.Compaction:   "tp_btf/sched_switch + tp_btf/sched_waking + tp_btf/mm_compaction_begin + tp_btf/mm_compaction_end",
	stage.PageCache:    "tp_btf/sched_switch + tp_btf/sched_waking",
	stage.BlockIO:      "tp_btf/sched_switch + tp_btf/sched_waking",
	stage.Lock:         "tp_btf/sched_switch + tp_btf/sched_waking + tp_btf/contention_begin + tp_btf/contention_end",
	stage.Syscall:      "tp_btf/sched_switch + tp_btf/sched_waking",
	stage.Stopped:      "tp_btf/sched_switch + tp_btf/sched_waking",
	stage.Wait:         "tp_btf/sched_switch + tp_btf/sched_waking",
	stage.AcceptQueue:  "tp_btf/inet_sock_set_state + tp_btf/sock_recv_length",
	stage.RequestBody:  "tp_btf/sk_data_ready + tp_btf/sock_recv_length",
	stage.ReceiveQueue: "tp_btf/sk_data_ready + tp_btf/sock_recv_length",
	stage.SendBuffer:   "tp_btf/tcp_sendmsg_locked + tp_btf/sock_send_length + tp_btf/net_dev_queue",
	stage.Qdisc:        "tp_btf/net_dev_queue + tp_btf/net_dev_start_xmit",
	stage.Retransmit:   "tp_btf/tcp_retransmit_skb + tp_btf/tcp_probe + tp_btf/net_dev_start_xmit + tp_btf/inet_sock_set_state",
}

// Each stage is measured, by the best hook that this kernel has, and the report says
// what the better one lacks. The lines that are printed are what docs/kernels.md is made of.
func TestEachStageIsMeasuredByTheHookOfThisKernel(t *testing.T) {
	requireRoot(t)
	p, err := probe.New(probe.Config{RingBytes: 1 << 16}, zap.NewNop())
	require.NoError(t, err)
	defer p.Close()
	version := kernelRelease(t)
	got := map[stage.Stage]probe.StageReport{}
	for _, r := range p.Report() {
		got[r.Stage] = r
		hook := r.Hook
		if !r.Available {
			hook = "unavailable"
		}
		fmt.Printf("hook: stage=%s hook=%s\n", r.Stage, hook)
	}
	require.Len(t, got, len(hooksEverywhere))
	for s, want := range hooksEverywhere {
		var lesser []string
		for _, h := range hooksByVersion {
			if strings.Contains(want, h.better) && version < h.since {
				want = strings.ReplaceAll(want, h.better, h.lesser)
				lesser = append(lesser, h.better)
			}
		}
		assert.True(t, got[s].Available, "%+v", got[s])
		assert.Equal(t, want, got[s].Hook, s)
		for _, h := range lesser {
			assert.Contains(t, got[s].Reason, h+": this kernel has no such tracepoint", s)
		}
		assert.NotContains(t, got[s].Reason, "in part", s)
	}
	c, err := p.Counters()
	require.NoError(t, err)
	for _, program := range []string{"sched_switch", "sched_waking", "page_fault_minor", "track_threads"} {
		assert.Contains(t, c.Missed, program, "whatever is loaded says what it has missed")
	}
}

// Below the floor the start is refused with the reason and the remedy, before anything is loaded.
func TestAKernelBelowTheFloorIsRefused(t *testing.T) {
	requireRoot(t)
	if kernelRelease(t) >= 5014 {
		t.Skip("this kernel is not below the floor")
	}
	_, err := probe.New(probe.Config{RingBytes: 1 << 16}, zap.NewNop())
	require.ErrorContains(t, err, "is too old")
	require.ErrorContains(t, err, "from Linux 5.14 on")
	assert.Empty(t, holds(t).programs)
}
