//go:build linux

package probe

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// load is how much a hook costs whom, and so when it is attached.
type load int

const (
	always    load = iota // rare events: programs started, ports opened, connections
	sockets               // with a candidate or a target: one event per read
	scheduler             // with a target: every context switch, fault and system call of the machine
)

// kind is how a program is attached.
type kind int

const (
	tracepoint kind = iota // with the types of its arguments (tp_btf)
	entry                  // of a kernel function (fentry)
	exit                   // of a kernel function (fexit)
	event                  // software event of perf, on every CPU
)

// way is one place of the kernel at which a hook can be had.
type way struct {
	kind    kind
	program string // its name in the C sources
	target  string // tracepoint or function; of an event the program again
	// args are the types of the arguments that the program takes, from the first on. The kernel must have
	// these; where a function is left it must have no others, since what it returns stands behind them.
	args  string
	event uint64 // PERF_COUNT_SW_*
	since string // kernels that have it, for the remedy
}

func (w *way) String() string {
	return [...]string{"tp_btf/", "fentry/", "fexit/", "perf_event/"}[w.kind] + w.target
}

// hook is a moment that the kernel side must be told of.
type hook struct {
	name  string
	ways  []way // of which the first is taken that the running kernel allows
	load  load
	after string // hook that ends what this one begins: without it this one is not attached
	core  bool   // nothing works without it
	// gone: kernels that have none of the functions do not need the hook, since what they do
	// goes through others'
	gone bool
}

// hooks lists them in the order of attachment. Those that open a state come
// after those that close it, so that nothing is left half open.
//
// A raw tracepoint would be one more way, but is to be had exactly where tp_btf
// is: both are the same mechanism in the kernel, and type information is needed in
// any case. A kprobe would be another, but its programs cannot reach what is
// kept with a socket, which is what every hook needs that is not a tracepoint on
// some supported kernel.
var hooks = []*hook{
	{name: "process_exec", load: always, core: true, ways: []way{
		{tracepoint, "process_exec", "sched_process_exec", "task_struct*", 0, "3.4"},
	}},
	{name: "sock_set_state", load: always, core: true, ways: []way{
		{tracepoint, "sock_set_state", "inet_sock_set_state", "sock*, int, int", 0, "4.16"},
	}},
	{name: "process_exit", load: sockets, core: true, ways: []way{
		{tracepoint, "process_exit", "sched_process_exit", "task_struct*", 0, "2.6.28"},
	}},
	{name: "process_fork", load: sockets, core: true, ways: []way{
		{tracepoint, "process_fork", "sched_process_fork", "task_struct*, task_struct*", 0, "2.6.28"},
	}},
	{name: "dev_xmit", load: scheduler, core: true, ways: []way{
		{tracepoint, "dev_xmit", "net_dev_start_xmit", "sk_buff*", 0, "3.14"},
	}},
	{name: "dev_queue", load: scheduler, core: true, ways: []way{
		{tracepoint, "dev_queue", "net_dev_queue", "sk_buff*", 0, "2.6.37"},
	}},
	{name: "send_length", load: scheduler, core: true, ways: []way{
		{tracepoint, "send_length", "sock_send_length", "sock*, int", 0, "6.3"},
		{exit, "send_length_fexit", "tcp_sendmsg", "sock*, msghdr*, size_t", 0, functions},
	}},
	{name: "sendmsg_locked", load: scheduler, core: true, ways: []way{
		{tracepoint, "sendmsg_locked", "tcp_sendmsg_locked", "sock*, msghdr*", 0, "6.16"},
		{entry, "sendmsg_locked_fentry", "tcp_sendmsg_locked", "sock*, msghdr*", 0, functions},
	}},
	{name: "sendpages_end", load: scheduler, core: true, gone: true, ways: []way{
		{exit, "sendpages_fexit", "do_tcp_sendpages", "sock*, page*, int, size_t, int", 0, functions},
	}},
	{name: "sendpages", load: scheduler, core: true, gone: true, ways: []way{
		{entry, "sendpages_fentry", "do_tcp_sendpages", "sock*, page*, int, size_t", 0, functions},
	}},
	{name: "recv_length", load: sockets, core: true, ways: []way{
		{tracepoint, "recv_length", "sock_recv_length", "sock*, int, int", 0, "6.3"},
		{exit, "recv_length_fexit", "tcp_recvmsg", "sock*, msghdr*, size_t, int, int*", 0, functions},
		{exit, "recv_length_nonblock_fexit", "tcp_recvmsg", "sock*, msghdr*, size_t, int, int, int*", 0, functions},
	}},
	{name: "data_ready", load: sockets, core: true, ways: []way{
		{tracepoint, "data_ready", "sk_data_ready", "sock*", 0, "6.3"},
		{entry, "data_ready_fentry", "sock_def_readable", "sock*", 0, functions},
	}},
	{name: "sched_switch", load: scheduler, ways: []way{
		{tracepoint, "sched_switch", "sched_switch", "bool, task_struct*, task_struct*", 0, "5.14"},
	}},
	{name: "sched_waking", load: scheduler, ways: []way{
		{tracepoint, "sched_waking", "sched_waking", "task_struct*", 0, "5.14"},
	}},
	{name: "contention_end", load: scheduler, ways: []way{
		{tracepoint, "contention_end", "contention_end", "", 0, "5.19"},
	}},
	{name: "contention_begin", after: "contention_end", load: scheduler, ways: []way{
		{tracepoint, "contention_begin", "contention_begin", "", 0, "5.19"},
	}},
	{name: "direct_reclaim_end", load: scheduler, ways: []way{
		{tracepoint, "direct_reclaim_end", "mm_vmscan_direct_reclaim_end", "", 0, "2.6.35"},
	}},
	{name: "direct_reclaim_begin", after: "direct_reclaim_end", load: scheduler, ways: []way{
		{tracepoint, "direct_reclaim_begin", "mm_vmscan_direct_reclaim_begin", "", 0, "2.6.35"},
	}},
	{name: "memcg_reclaim_end", load: scheduler, ways: []way{
		{tracepoint, "memcg_reclaim_end", "mm_vmscan_memcg_reclaim_end", "", 0, "3.2 with CONFIG_MEMCG"},
	}},
	{name: "memcg_reclaim_begin", after: "memcg_reclaim_end", load: scheduler, ways: []way{
		{tracepoint, "memcg_reclaim_begin", "mm_vmscan_memcg_reclaim_begin", "", 0, "3.2 with CONFIG_MEMCG"},
	}},
	{name: "compaction_end", load: scheduler, ways: []way{
		{tracepoint, "compaction_end", "mm_compaction_end", "", 0, "3.19 with CONFIG_COMPACTION"},
	}},
	{name: "compaction_begin", after: "compaction_end", load: scheduler, ways: []way{
		{tracepoint, "compaction_begin", "mm_compaction_begin", "", 0, "3.19 with CONFIG_COMPACTION"},
	}},
	{name: "tcp_ack", load: scheduler, ways: []way{
		{tracepoint, "tcp_ack", "tcp_probe", "sock*, sk_buff*", 0, "4.16"},
	}},
	{name: "tcp_retransmit", after: "tcp_ack", load: scheduler, ways: []way{
		{tracepoint, "tcp_retransmit", "tcp_retransmit_skb", "sock*, sk_buff*", 0, "4.15"},
	}},
	{name: "softirq_entry", load: scheduler, ways: []way{
		{tracepoint, "softirq_entry", "softirq_entry", "unsigned int", 0, "2.6.31"},
	}},
	{name: "softirq_raise", after: "softirq_entry", load: scheduler, ways: []way{
		{tracepoint, "softirq_raise", "softirq_raise", "unsigned int", 0, "2.6.37"},
	}},
	{name: "page_fault_minor", load: scheduler, ways: []way{
		{event, "page_fault_minor", "page_fault_minor", "", unix.PERF_COUNT_SW_PAGE_FAULTS_MIN, "2.6.31"},
	}},
	{name: "page_fault_major", load: scheduler, ways: []way{
		{event, "page_fault_major", "page_fault_major", "", unix.PERF_COUNT_SW_PAGE_FAULTS_MAJ, "2.6.31"},
	}},
	{name: "page_fault_user", load: scheduler, ways: []way{
		{tracepoint, "page_fault_user", "page_fault_user", "", 0, "3.13 on x86-64"},
	}},
	{name: "page_fault_kernel", load: scheduler, ways: []way{
		{tracepoint, "page_fault_kernel", "page_fault_kernel", "", 0, "3.13 on x86-64"},
	}},
}

// functions is what kernels have on which functions can be hooked.
const functions = "5.14 on x86-64, built with CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS"

// needs lists the hooks that a stage is measured by. All must be attached.
var needs = map[stage.Stage][]string{
	stage.CPU:          {"sched_switch", "sched_waking"},
	stage.RunQueue:     {"sched_switch", "sched_waking"},
	stage.Throttled:    {"sched_switch", "sched_waking"},
	stage.PageFault:    {"sched_switch", "sched_waking", "page_fault_user", "page_fault_minor", "page_fault_major"},
	stage.Reclaim:      {"sched_switch", "sched_waking", "direct_reclaim_begin", "direct_reclaim_end"},
	stage.Compaction:   {"sched_switch", "sched_waking", "compaction_begin", "compaction_end"},
	stage.PageCache:    {"sched_switch", "sched_waking"},
	stage.BlockIO:      {"sched_switch", "sched_waking"},
	stage.Lock:         {"sched_switch", "sched_waking"},
	stage.Syscall:      {"sched_switch", "sched_waking"},
	stage.Stopped:      {"sched_switch", "sched_waking"},
	stage.Wait:         {"sched_switch", "sched_waking"},
	stage.AcceptQueue:  {"sock_set_state", "recv_length"},
	stage.RequestBody:  {"data_ready", "recv_length"},
	stage.ReceiveQueue: {"data_ready", "recv_length"},
	stage.SendBuffer:   {"sendmsg_locked", "send_length", "dev_queue"},
	stage.Qdisc:        {"dev_queue", "dev_xmit"},
	stage.Retransmit:   {"tcp_retransmit", "tcp_ack", "dev_xmit", "sock_set_state"},
}

// helpful lists hooks that a stage gains by but can do without.
var helpful = map[stage.Stage][]string{
	stage.PageFault: {"page_fault_kernel"},
	stage.Reclaim:   {"memcg_reclaim_begin", "memcg_reclaim_end"},
	stage.Lock:      {"contention_begin", "contention_end"},
	// evidence: what brings a request's bytes may wait for a CPU too
	stage.RunQueue: {"softirq_raise", "softirq_entry"},
}

// wanted returns the hooks that serve a stage that is not disabled, or the core.
func wanted(disabled []stage.Stage) []*hook {
	use := map[string]bool{}
	for s, programs := range needs {
		if !slices.Contains(disabled, s) {
			for _, p := range append(slices.Clone(programs), helpful[s]...) {
				use[p] = true
			}
		}
	}
	var list []*hook
	for _, h := range hooks {
		if h.core || use[h.name] {
			list = append(list, h)
		}
	}
	return list
}

// attach returns a function that detaches again.
func (w *way) attach(p *ebpf.Program) (func() error, error) {
	if w.kind == event {
		return attachPerf(w, p)
	}
	l, err := link.AttachTracing(link.TracingOptions{Program: p})
	if err != nil {
		return nil, fmt.Errorf("attach %s: %w", w, err)
	}
	return l.Close, nil
}

// attachPerf attaches the program to the software event on every online CPU.
func attachPerf(w *way, p *ebpf.Program) (_ func() error, err error) {
	var fds []int
	detach := func() error {
		var errs []error
		for _, fd := range fds {
			errs = append(errs, unix.Close(fd))
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, detach())
		}
	}()
	cpus, err := onlineCPUs()
	if err != nil {
		return nil, err
	}
	attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Config: w.event, Sample: 1, Bits: unix.PerfBitDisabled}
	attr.Size = uint32(unsafe.Sizeof(attr)) // as much as is ours: an older kernel refuses more unless it is zero
	for _, cpu := range cpus {
		fd, err := unix.PerfEventOpen(&attr, -1, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
		if err != nil {
			return nil, fmt.Errorf("open the software event of %s on CPU %d (is kernel.perf_event_paranoid above 2, or CAP_PERFMON missing?): %w", w, cpu, err)
		}
		fds = append(fds, fd)
		if err := unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_SET_BPF, p.FD()); err != nil {
			return nil, fmt.Errorf("attach %s on CPU %d: %w", w, cpu, err)
		}
		if err := unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_ENABLE, 0); err != nil {
			return nil, fmt.Errorf("enable %s on CPU %d: %w", w, cpu, err)
		}
	}
	return detach, nil
}

// StageReport says how a stage is measured, or why it is not.
type StageReport struct {
	Stage     stage.Stage
	Available bool
	Hook      string // hooks in use, joined by " + "
	// Reason says why it is not available, or else what is missing from it, or why it is not measured by a
	// better hook.
	Reason string
}

// report tells of every stage, given what was chosen for each hook.
func report(disabled []stage.Stage, chosen map[string]choice) []StageReport {
	var list []StageReport
	for _, s := range stage.All() {
		names, ok := needs[s]
		if !ok {
			continue // unattributed is what remains
		}
		r := StageReport{Stage: s, Available: true}
		if slices.Contains(disabled, s) {
			r.Available, r.Reason = false, "disabled in the configuration"
			list = append(list, r)
			continue
		}
		var use, less []string
		for _, n := range names {
			c := chosen[n]
			if c.err != nil {
				r.Available, r.Reason = false, c.err.Error()
				break
			}
			use = append(use, c.way.String())
			for _, err := range c.refused {
				less = append(less, err.Error())
			}
		}
		if !r.Available {
			list = append(list, r)
			continue
		}
		for _, n := range helpful[s] {
			if c := chosen[n]; c.err != nil {
				less = append(less, "in part: "+c.err.Error())
			} else {
				use = append(use, c.way.String())
			}
		}
		r.Hook, r.Reason = strings.Join(use, " + "), strings.Join(less, "; ")
		list = append(list, r)
	}
	return list
}
