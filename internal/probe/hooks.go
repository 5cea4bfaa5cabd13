//go:build linux

package probe

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
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

// hook is one program of the kernel side and where it is attached.
type hook struct {
	program string // its name in the C sources
	// tracepoint it needs in the kernel's BTF; "" for a perf software event
	tracepoint string
	event      uint64 // PERF_COUNT_SW_*, where tracepoint is ""
	load       load
	after      string // program that ends what this one begins: without it this one is not attached
	core       bool   // nothing works without it
	since      string // first kernel that has it, for the remedy
}

func (h *hook) String() string {
	if h.tracepoint == "" {
		return "perf_event/" + h.program
	}
	return "tp_btf/" + h.tracepoint
}

// hooks lists them in the order of attachment. Programs that open a state come
// after those that close it, so that nothing is left half open.
var hooks = []*hook{
	{program: "process_exec", tracepoint: "sched_process_exec", load: always, core: true, since: "3.4"},
	{program: "sock_set_state", tracepoint: "inet_sock_set_state", load: always, core: true, since: "4.16"},
	{program: "process_exit", tracepoint: "sched_process_exit", load: sockets, core: true, since: "2.6.28"},
	{program: "process_fork", tracepoint: "sched_process_fork", load: sockets, core: true, since: "2.6.28"},
	{program: "dev_xmit", tracepoint: "net_dev_start_xmit", load: scheduler, core: true, since: "3.14"},
	{program: "dev_queue", tracepoint: "net_dev_queue", load: scheduler, core: true, since: "2.6.37"},
	{program: "send_length", tracepoint: "sock_send_length", load: scheduler, core: true, since: "6.3"},
	{program: "sendmsg_locked", tracepoint: "tcp_sendmsg_locked", load: scheduler, core: true, since: "6.16"},
	{program: "recv_length", tracepoint: "sock_recv_length", load: sockets, core: true, since: "6.3"},
	{program: "data_ready", tracepoint: "sk_data_ready", load: sockets, core: true, since: "6.3"},
	{program: "sched_switch", tracepoint: "sched_switch", load: scheduler, since: "5.14"},
	{program: "sched_waking", tracepoint: "sched_waking", load: scheduler, since: "5.14"},
	{program: "contention_end", tracepoint: "contention_end", load: scheduler, since: "5.19"},
	{program: "contention_begin", tracepoint: "contention_begin", after: "contention_end", load: scheduler, since: "5.19"},
	{program: "direct_reclaim_end", tracepoint: "mm_vmscan_direct_reclaim_end", load: scheduler, since: "2.6.35"},
	{program: "direct_reclaim_begin", tracepoint: "mm_vmscan_direct_reclaim_begin", after: "direct_reclaim_end", load: scheduler, since: "2.6.35"},
	{program: "memcg_reclaim_end", tracepoint: "mm_vmscan_memcg_reclaim_end", load: scheduler, since: "3.2 with CONFIG_MEMCG"},
	{program: "memcg_reclaim_begin", tracepoint: "mm_vmscan_memcg_reclaim_begin", after: "memcg_reclaim_end", load: scheduler, since: "3.2 with CONFIG_MEMCG"},
	{program: "compaction_end", tracepoint: "mm_compaction_end", load: scheduler, since: "3.19 with CONFIG_COMPACTION"},
	{program: "compaction_begin", tracepoint: "mm_compaction_begin", after: "compaction_end", load: scheduler, since: "3.19 with CONFIG_COMPACTION"},
	{program: "tcp_ack", tracepoint: "tcp_probe", load: scheduler, since: "4.16"},
	{program: "tcp_retransmit", tracepoint: "tcp_retransmit_skb", after: "tcp_ack", load: scheduler, since: "4.15"},
	{program: "softirq_entry", tracepoint: "softirq_entry", load: scheduler, since: "2.6.31"},
	{program: "softirq_raise", tracepoint: "softirq_raise", after: "softirq_entry", load: scheduler, since: "2.6.37"},
	{program: "page_fault_minor", event: unix.PERF_COUNT_SW_PAGE_FAULTS_MIN, load: scheduler, since: "2.6.31"},
	{program: "page_fault_major", event: unix.PERF_COUNT_SW_PAGE_FAULTS_MAJ, load: scheduler, since: "2.6.31"},
	{program: "page_fault_user", tracepoint: "page_fault_user", load: scheduler, since: "3.13 on x86-64"},
	{program: "page_fault_kernel", tracepoint: "page_fault_kernel", load: scheduler, since: "3.13 on x86-64"},
}

// needs lists the programs that a stage is measured by. All must be attached.
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

// helpful lists programs that a stage gains by but can do without.
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
		if h.core || use[h.program] {
			list = append(list, h)
		}
	}
	return list
}

// missing returns why the kernel does not have the hook, or nil.
func (h *hook) missing(kernel *btf.Spec) error {
	if h.tracepoint == "" {
		return nil
	}
	var typedef *btf.Typedef
	if err := kernel.TypeByName("btf_trace_"+h.tracepoint, &typedef); err != nil {
		return fmt.Errorf("this kernel has no tracepoint %s (needs Linux %s)", h.tracepoint, h.since)
	}
	return nil
}

// attach returns a function that detaches again.
func (h *hook) attach(p *ebpf.Program) (func() error, error) {
	if h.tracepoint != "" {
		l, err := link.AttachTracing(link.TracingOptions{Program: p})
		if err != nil {
			return nil, fmt.Errorf("attach %s: %w", h, err)
		}
		return l.Close, nil
	}
	return attachPerf(h, p)
}

// attachPerf attaches the program to the software event on every online CPU.
func attachPerf(h *hook, p *ebpf.Program) (detach func() error, err error) {
	var fds []int
	detach = func() error {
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
	attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Config: h.event, Sample: 1, Bits: unix.PerfBitDisabled}
	attr.Size = uint32(unix.PERF_ATTR_SIZE_VER8)
	for _, cpu := range cpus {
		fd, err := unix.PerfEventOpen(&attr, -1, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
		if err != nil {
			return nil, fmt.Errorf("open the software event of %s on CPU %d (is kernel.perf_event_paranoid above 2, or CAP_PERFMON missing?): %w", h, cpu, err)
		}
		fds = append(fds, fd)
		if err := unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_SET_BPF, p.FD()); err != nil {
			return nil, fmt.Errorf("attach %s on CPU %d: %w", h, cpu, err)
		}
		if err := unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_ENABLE, 0); err != nil {
			return nil, fmt.Errorf("enable %s on CPU %d: %w", h, cpu, err)
		}
	}
	return detach, nil
}

// StageReport says how a stage is measured, or why it is not.
type StageReport struct {
	Stage     stage.Stage
	Available bool
	Hook      string // hooks in use, joined by " + "
	Reason    string // why it is not available, or what is missing from it
}

// report tells of every stage, given why hooks could not be had.
func report(disabled []stage.Stage, failed map[string]error) []StageReport {
	byProgram := map[string]*hook{}
	for _, h := range hooks {
		byProgram[h.program] = h
	}
	var list []StageReport
	for _, s := range stage.All() {
		programs, ok := needs[s]
		if !ok {
			continue // unattributed is what remains
		}
		r := StageReport{Stage: s, Available: true}
		if slices.Contains(disabled, s) {
			r.Available, r.Reason = false, "disabled in the configuration"
			list = append(list, r)
			continue
		}
		var names []string
		for _, p := range programs {
			names = append(names, byProgram[p].String())
			if err := failed[p]; err != nil {
				r.Available, r.Reason = false, err.Error()
			}
		}
		for _, p := range helpful[s] {
			if err := failed[p]; err != nil {
				r.Reason = "in part: " + err.Error()
			} else {
				names = append(names, byProgram[p].String())
			}
		}
		if r.Available {
			r.Hook = strings.Join(names, " + ")
		}
		list = append(list, r)
	}
	return list
}
