//go:build linux

// Package probe runs the kernel side: it loads the programs of package bpf,
// attaches them as long as there is somebody to watch, and reads what they send
// up.
//
// The ring is polled: records never wake the reader, since a wake-up would cost
// the watched thread some hundred times what the record does.
package probe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/cilium/ebpf/rlimit"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/bpf"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// How long a record may lie in the ring. The ring is read more often under load,
// since a long reading would take a processor from those who are watched.
const (
	PollInterval    = 25 * time.Millisecond
	minPollInterval = 2 * time.Millisecond
	manyRecords     = 256 // in one reading

	// maxRecords are read without a Tick: under overload the ring is never empty, and
	// what goes by ticks must go on.
	maxRecords = 4096
)

// Config of a probe.
type Config struct {
	RingBytes   int           // size of the ring; a power of two, at least a page
	MinDuration time.Duration // shorter stretches of a stage get no record of their own
	Disabled    []stage.Stage // not measured; hooks that serve only these are not attached
}

// Tracking says what is known of a process that is to be watched.
type Tracking struct {
	Candidate bool  // look at request lines only
	IsGo      bool  // goroutines serve
	GoOffset  int64 // where g is kept, from the FS base; with IsGo, 0 means unknown
}

// Probe is the kernel side at work.
type Probe struct {
	cfg       Config
	logger    *zap.Logger
	objects   *ebpf.Collection
	ring      *ringbuf.Reader
	chosen    map[string]choice // by hook
	noContext error             // why a CPU's preempt count cannot be read; nil if it can

	mu        sync.Mutex // guards what follows
	detach    map[string]func() error
	processes map[uint32]Tracking
	closed    bool

	invalid atomic.Uint64             // records that did not decode
	records [eventKinds]atomic.Uint64 // handled
}

// New loads the kernel side and tries every hook once. It attaches only what
// finds new programs and ports; Track attaches the rest. The error names what
// is missing and what to do about it.
func New(cfg Config, logger *zap.Logger) (*Probe, error) {
	if err := checkKernel(); err != nil {
		return nil, err
	}
	if err := checkCapabilities(); err != nil {
		return nil, err
	}
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return nil, fmt.Errorf("the running kernel offers no type information (/sys/kernel/btf/vmlinux): it must be built with CONFIG_DEBUG_INFO_BTF, as distributions' kernels from 5.14 on are: %w", err)
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("raise the limit on locked memory (CAP_SYS_RESOURCE, or a kernel from 5.11 on): %w", err)
	}
	spec, err := bpf.LoadKernel()
	if err != nil {
		return nil, fmt.Errorf("read the embedded programs: %w", err)
	}
	if err := spec.Variables["min_duration"].Set(uint64(max(cfg.MinDuration, 0))); err != nil {
		return nil, fmt.Errorf("set min_duration: %w", err)
	}
	if err := spec.Variables["numa"].Set(balancesNUMA("/")); err != nil {
		return nil, fmt.Errorf("set numa: %w", err)
	}
	at, noContext := preemptCountAt(kernel)
	if noContext == nil {
		if err := spec.Variables["preempt_count_known"].Set(uint8(1)); err != nil {
			return nil, fmt.Errorf("set preempt_count_known: %w", err)
		}
		if err := spec.Variables["preempt_count_at"].Set(at); err != nil {
			return nil, fmt.Errorf("set preempt_count_at: %w", err)
		}
	}
	spec.Maps["ring"].MaxEntries = uint32(cfg.RingBytes)

	p := &Probe{
		cfg: cfg, logger: logger, chosen: map[string]choice{}, noContext: noContext,
		detach: map[string]func() error{}, processes: map[uint32]Tracking{},
	}
	load := map[string]*ebpf.ProgramSpec{"track_threads": spec.Programs["track_threads"]}
	for _, h := range wanted(cfg.Disabled) {
		if h.unneeded(kernel) {
			continue
		}
		c := h.choose(kernel, spec.Programs, try)
		if c.err != nil && h.core {
			return nil, fmt.Errorf("cannot watch requests: %w", explain(c.err))
		}
		p.chosen[h.name] = c
		if c.err == nil {
			load[c.way.program] = spec.Programs[c.way.program]
		}
	}
	spec.Programs = load
	p.objects, err = ebpf.NewCollection(spec)
	if err != nil {
		return nil, fmt.Errorf("load the kernel programs: %w", explain(err))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	if p.ring, err = ringbuf.NewReader(p.objects.Maps["ring"]); err != nil {
		return nil, fmt.Errorf("open the ring buffer: %w", err)
	}
	for _, h := range p.use() {
		if c := p.chosen[h.after]; c.err != nil {
			p.chosen[h.name] = choice{err: c.err}
			continue
		}
		if err = p.attach(h); err != nil {
			if h.core {
				return nil, fmt.Errorf("cannot watch requests: %w", explain(err))
			}
			p.chosen[h.name] = choice{err: err}
			err = nil
		}
	}
	return p, p.settle()
}

// Report tells of each stage how it is measured, or why it is not.
func (p *Probe) Report() []StageReport {
	list := report(p.cfg.Disabled, p.chosen)
	for i := range list {
		r := &list[i]
		if !r.Available || p.noContext == nil {
			continue
		}
		switch r.Stage {
		case stage.Wait:
			r.Reason = "in part: wake-up chains are not followed: " + p.noContext.Error()
		case stage.RunQueue:
			r.Reason = "in part: the delay of softirqs is not known: " + p.noContext.Error()
		}
	}
	return list
}

// Unavailable lists the stages that are not measured.
func (p *Probe) Unavailable() []stage.Stage {
	var list []stage.Stage
	for _, r := range p.Report() {
		if !r.Available {
			list = append(list, r.Stage)
		}
	}
	return list
}

// use lists the hooks that can be had.
func (p *Probe) use() []*hook {
	var list []*hook
	for _, h := range hooks {
		if c, ok := p.chosen[h.name]; ok && c.err == nil {
			list = append(list, h)
		}
	}
	return list
}

func (p *Probe) attach(h *hook) error {
	if p.detach[h.name] != nil {
		return nil
	}
	w := p.chosen[h.name].way
	detach, err := w.attach(p.objects.Programs[w.program])
	if err != nil {
		return err
	}
	p.detach[h.name] = detach
	return nil
}

// settle attaches what the tracked processes call for and detaches the rest.
func (p *Probe) settle() error {
	need := always
	for _, t := range p.processes {
		if !t.Candidate {
			need = scheduler
			break
		}
		need = sockets
	}
	var errs []error
	use := p.use()
	for _, h := range use {
		if h.load <= need {
			errs = append(errs, p.attach(h))
		}
	}
	for _, h := range slices.Backward(use) {
		if detach := p.detach[h.name]; detach != nil && h.load > need {
			delete(p.detach, h.name)
			errs = append(errs, detach())
		}
	}
	return errors.Join(errs...)
}

// Track watches a process and all it starts from now on. Tracking it again
// changes what is known of it.
func (p *Probe) Track(pid uint32, t Tracking) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return os.ErrClosed
	}
	kernel := bpf.KernelProcess{GoOffset: int32(t.GoOffset)}
	switch {
	case t.IsGo && t.GoOffset == 0:
		kernel.Flags |= uint32(bpf.KernelProcessFlagsPROCESS_NO_LANE)
	case t.IsGo:
		kernel.Flags |= uint32(bpf.KernelProcessFlagsPROCESS_GO)
	}
	if t.Candidate {
		kernel.Flags |= uint32(bpf.KernelProcessFlagsPROCESS_CANDIDATE)
	}
	if err := p.objects.Maps["processes"].Put(pid, kernel); err != nil {
		return fmt.Errorf("track process %d: %w", pid, err)
	}
	p.processes[pid] = t
	// hooks first: a thread that starts in between is then seen by one or the other
	if err := p.settle(); err != nil {
		return err
	}
	return p.visitThreads()
}

// Untrack stops watching a process. One that is not tracked is no error.
func (p *Probe) Untrack(pid uint32) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return os.ErrClosed
	}
	_, known := p.processes[pid]
	delete(p.processes, pid)
	if !known && p.forked(pid) {
		return p.settle()
	}
	forget := bpf.KernelProcess{Flags: uint32(bpf.KernelProcessFlagsPROCESS_FORGET)}
	err := p.objects.Maps["processes"].Update(pid, forget, ebpf.UpdateExist)
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist): // it ended, and the kernel side has dropped it
		return p.settle()
	case err != nil:
		return fmt.Errorf("stop tracking process %d: %w", pid, err)
	}
	err = p.visitThreads()
	if e := p.objects.Maps["processes"].Delete(pid); e != nil && !errors.Is(e, ebpf.ErrKeyNotExist) {
		err = errors.Join(err, e)
	}
	return errors.Join(err, p.settle())
}

// forked tells whether the kernel side watches a process of that pid of which
// nothing is known here yet: the pid was given out again, and the record of the
// new process's beginning is still to be read.
func (p *Probe) forked(pid uint32) bool {
	var kernel bpf.KernelProcess
	err := p.objects.Maps["processes"].Lookup(pid, &kernel)
	return err == nil && kernel.Flags&uint32(bpf.KernelProcessFlagsPROCESS_FORKED) != 0
}

// AddPort makes connections to a listening port known to the kernel side. A
// tracked process that begins to listen is seen without this.
func (p *Probe) AddPort(netns uint32, port uint16) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return os.ErrClosed
	}
	key := bpf.KernelPortKey{Netns: netns, Port: uint32(port)}
	if err := p.objects.Maps["ports"].Put(key, uint32(0)); err != nil {
		return fmt.Errorf("watch port %d of network namespace %d: %w", port, netns, err)
	}
	return nil
}

// DropPorts forgets the ports at which a listener has closed and that AddPort has
// not named since: several may listen on one port.
func (p *Probe) DropPorts() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return os.ErrClosed
	}
	var (
		ports  = p.objects.Maps["ports"]
		key    bpf.KernelPortKey
		closed uint32
		drop   []bpf.KernelPortKey
	)
	it := ports.Iterate()
	for it.Next(&key, &closed) {
		if closed != 0 {
			drop = append(drop, key)
		}
	}
	errs := []error{it.Err()}
	for _, key := range drop {
		if err := ports.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("forget ports that nobody listens on: %w", err)
	}
	return nil
}

// visitThreads lets the kernel side look at every thread of the machine.
func (p *Probe) visitThreads() error {
	it, err := link.AttachIter(link.IterOptions{Program: p.objects.Programs["track_threads"]})
	if err != nil {
		return fmt.Errorf("attach the task iterator: %w", err)
	}
	defer it.Close()
	r, err := it.Open()
	if err != nil {
		return fmt.Errorf("run the task iterator: %w", err)
	}
	defer r.Close()
	if _, err := io.Copy(io.Discard, r); err != nil {
		return fmt.Errorf("run the task iterator: %w", err)
	}
	return nil
}

// Run reads the ring until the context ends and hands each event to handle, in
// order, then a Tick. It handles what is left before it returns. Its thread gives
// way to all others meanwhile.
func (p *Probe) Run(ctx context.Context, handle func(Event)) error {
	restore, err := giveWay()
	defer restore()
	if err != nil {
		p.logger.Warn("The reader of the kernel's records may delay the servers on its CPU", zap.Error(err))
	}
	var record ringbuf.Record
	for interval := PollInterval; ; {
		last := ctx.Err() != nil
		p.ring.SetDeadline(time.Now().Add(interval))
		if last {
			p.ring.SetDeadline(time.Now())
		}
		n := 0
		for ; ; n++ {
			err := p.ring.ReadInto(&record)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil {
				return fmt.Errorf("read the ring buffer: %w", err)
			}
			p.handle(record.RawSample, handle)
			if (n+1)%yieldAfter == 0 {
				p.offerCPU()
			}
			if (n+1)%maxRecords == 0 {
				// not the present: much may lie in the ring that happened before it
				handle(&Tick{Now: timeOf(record.RawSample)})
			}
		}
		handle(&Tick{Now: Now()})
		if last {
			return nil
		}
		if n > manyRecords {
			interval = max(interval/2, minPollInterval)
		} else if n < manyRecords/4 {
			interval = min(interval*2, PollInterval)
		}
	}
}

func (p *Probe) handle(raw []byte, handle func(Event)) {
	e, err := decode(raw)
	if err != nil {
		p.invalid.Add(1)
		p.logger.Debug("Kernel record dropped", zap.Error(err))
		return
	}
	p.records[kindOf(e)].Add(1)
	switch e := e.(type) {
	case *Fork: // tracked by the kernel side already
		p.mu.Lock()
		p.processes[e.PID] = p.processes[e.Parent]
		p.mu.Unlock()
	case *Exec: // of a Go program the goroutines are gone
		p.mu.Lock()
		if t := p.processes[e.PID]; t.IsGo {
			p.dropLanes(e.PID, func(k bpf.KernelLaneKey) bool { return k.Goroutine != 0 })
			t.IsGo = false
			p.processes[e.PID] = t
		}
		p.mu.Unlock()
	case *Exit:
		p.mu.Lock()
		if p.processes[e.PID].IsGo {
			p.dropLanes(e.PID, func(bpf.KernelLaneKey) bool { return true })
		}
		delete(p.processes, e.PID)
		if err := p.settle(); err != nil {
			p.logger.Error("Cannot detach hooks after the last target's end", zap.Error(err))
		}
		p.mu.Unlock()
	}
	handle(e)
}

// dropLanes removes lanes of a process: goroutines do not take theirs with them,
// as threads do.
func (p *Probe) dropLanes(pid uint32, which func(bpf.KernelLaneKey) bool) {
	var (
		lanes = p.objects.Maps["lanes"]
		key   bpf.KernelLaneKey
		value bpf.KernelLane
		ended []bpf.KernelLaneKey
	)
	for it := lanes.Iterate(); it.Next(&key, &value); {
		if key.Tgid == pid && which(key) {
			ended = append(ended, key)
		}
	}
	for _, key := range ended {
		if err := lanes.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			p.logger.Warn("A lane cannot be removed", zap.Error(err))
		}
	}
}

// Now is the present time of the kernel's records: CLOCK_MONOTONIC nanoseconds.
func Now() uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic("clock_gettime(CLOCK_MONOTONIC): " + err.Error()) // cannot fail with a valid clock id
	}
	return uint64(ts.Nano())
}

// Close detaches and unloads everything.
func (p *Probe) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	var errs []error
	for _, detach := range p.detach {
		errs = append(errs, detach())
	}
	if p.ring != nil {
		errs = append(errs, p.ring.Close())
	}
	if p.objects != nil {
		p.objects.Close()
		// the memory of the programs' variables is unmapped when it is collected, and holds two maps until then
		p.objects = nil
		runtime.GC()
	}
	return errors.Join(errs...)
}
