//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// config is one way of being watched, or of being beside it.
type config struct {
	name     string
	bar      float64
	disabled []stage.Stage
	llm      bool // the server is llama.cpp
	beside   bool // another server is the target
	nobody   bool // there is no target
	hot      bool // the client is on the server's CPU, which so never halts
	extra    bool // only measured where it is asked for
}

var configs = []config{
	{name: "echo_all", bar: 1.12},
	{name: "echo_tcp", bar: 1.08, disabled: threadStages},
	{name: "llm_all", bar: 1.01, llm: true},
	{name: "bystander", bar: 1.03, beside: true},
	{name: "no_target", bar: 1.01, nobody: true},
	// There is no bar: what a request costs here is little more than the kernel's own path.
	{name: "echo_hot", hot: true, extra: true},
}

var threadStages = slices.DeleteFunc(stage.All(), func(s stage.Stage) bool { return s.Socket() || s == stage.Unattributed })

// settling is how long the machine is left alone before a round: programs are
// loaded once and then run for weeks, and what loading and unloading them leaves
// behind (memory to be freed, page tables, caches) is not what they cost.
const settling = 500 * time.Millisecond

// A round is one reading: processor time and latency in microseconds.
type round struct{ cpu, p99 float64 }

func measure(ctx context.Context, c config, rounds, requests int, programs bool) (r row, err error) {
	dir, err := os.MkdirTemp("", "ebpfllm-servercost-")
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	var s *server
	if c.llm {
		requests /= llmShare
		s, err = startLLM(ctx, dir)
	} else {
		s, err = startEcho(ctx, dir, serverCPU)
	}
	if err != nil {
		return r, err
	}
	defer s.stop()
	watched, beside := s, (*server)(nil)
	if c.beside {
		if beside, err = startEcho(ctx, dir, clientCPU); err != nil {
			return r, err
		}
		defer beside.stop()
		watched = beside
	}
	if c.nobody {
		watched = nil
	}
	one := func() (round, error) {
		if c.llm {
			return s.askLLM(ctx, requests)
		}
		return s.askEcho(ctx, requests, beside, c.hot)
	}
	var on, off []round
	for i := range 2*rounds + 1 {
		if i%2 == 0 {
			time.Sleep(settling)
			m, err := one()
			if err != nil {
				return r, err
			}
			off = append(off, m)
			continue
		}
		w, err := attach(c, watched)
		if err != nil {
			return r, err
		}
		time.Sleep(settling)
		m, err := one()
		on = append(on, m)
		if err := errors.Join(err, w.detach(&r)); err != nil {
			return r, err
		}
	}
	if watched != nil && r.Seen == 0 {
		return r, errors.New("the kernel side saw no request of its target")
	}
	r.Name, r.Bar, r.Rounds = c.name, c.bar, rounds
	cpu := ratios(off, on, func(r round) float64 { return r.cpu })
	r.CPUP25, r.CPUMedian, r.CPUP75 = quantile(cpu, 0.25), quantile(cpu, 0.5), quantile(cpu, 0.75)
	r.CPULow, r.CPUHigh = medianInterval(cpu)
	r.P99Median = quantile(ratios(off, on, func(r round) float64 { return r.p99 }), 0.5)
	r.ControlP25, r.ControlP75 = control(off)
	r.CPUOff, r.P99Off = medians(off)
	r.CPUOn, r.P99On = medians(on)
	if programs && watched != nil {
		if r.Programs, err = runs(c, watched, one, requests); err != nil {
			return r, err
		}
	}
	return r, nil
}

// runs asks once more with the kernel counting its programs, which itself costs.
func runs(c config, watched *server, one func() (round, error), requests int) (list []program, err error) {
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("have the kernel count its programs: %w", err)
	}
	defer func() { err = errors.Join(err, stats.Close()) }()
	w, err := attach(c, watched)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.detach(new(row))) }()
	before := w.probe.Runs()
	if _, err := one(); err != nil {
		return nil, err
	}
	n := float64(requests + requests/20 + 1) // with the warm-up
	if c.llm {
		n = float64(requests) + float64(llmWarmUp)/llmTokens
	}
	for name, after := range w.probe.Runs() {
		if count := after.Count - before[name].Count; count > 0 {
			list = append(list, program{name, float64(count) / n, float64(after.Time-before[name].Time) / float64(count)})
		}
	}
	slices.SortFunc(list, func(a, b program) int { return cmp.Compare(b.Runs*b.NS, a.Runs*a.NS) })
	return list, nil
}

// watching is the kernel side at work, with its reader.
type watching struct {
	probe  *probe.Probe
	cancel context.CancelFunc
	done   chan error
	seen   int
}

func (*watching) Begin(*assemble.Request)         {}
func (*watching) Occurrence(*assemble.Occurrence) {}
func (w *watching) Finish(*assemble.Request)      { w.seen++ }

// attach loads and attaches the kernel side, with a server as its target or none.
func attach(c config, s *server) (*watching, error) {
	p, err := probe.New(probe.Config{RingBytes: 8 << 20, MinDuration: time.Millisecond, Disabled: c.disabled}, zap.NewNop())
	if err != nil {
		return nil, err
	}
	w := &watching{probe: p, done: make(chan error, 1)}
	if s != nil {
		if err := w.track(s); err != nil {
			return nil, errors.Join(err, p.Close())
		}
	}
	a := assemble.New(assemble.Config{MinDuration: int64(time.Millisecond), Unavailable: p.Unavailable()}, w)
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	go func() { w.done <- p.Run(ctx, a.Handle) }()
	return w, nil
}

func (w *watching) track(s *server) error {
	var netns syscall.Stat_t
	if err := syscall.Stat("/proc/self/ns/net", &netns); err != nil {
		return err
	}
	addr, err := net.ResolveTCPAddr("tcp", s.addr)
	if err != nil {
		return err
	}
	if err := w.probe.AddPort(uint32(netns.Ino), uint16(addr.Port)); err != nil {
		return err
	}
	return w.probe.Track(s.pid(), s.tracking)
}

// detach takes the kernel side off the machine, and adds what it saw to the row.
func (w *watching) detach(r *row) error {
	w.cancel()
	err := <-w.done
	r.Seen += w.seen
	c, e := w.probe.Counters()
	for _, n := range c.Lost {
		r.Lost += n
	}
	return errors.Join(err, e, w.probe.Close())
}

// ratios sets each round with the kernel side against the mean of the rounds
// without it before and after it: on[i] lies between off[i] and off[i+1].
func ratios(off, on []round, of func(round) float64) []float64 {
	var list []float64
	for i := range on {
		list = append(list, 2*of(on[i])/(of(off[i])+of(off[i+1])))
	}
	return list
}

// control has the quartiles of the same ratio for rounds that are no different
// from their neighbours. They lie twice as far apart in time.
func control(off []round) (p25, p75 float64) {
	var outer, inner []round
	for i, r := range off {
		if i%2 == 0 {
			outer = append(outer, r)
		} else {
			inner = append(inner, r)
		}
	}
	if len(outer) == len(inner) {
		inner = inner[:len(inner)-1]
	}
	v := ratios(outer, inner, func(r round) float64 { return r.cpu })
	return quantile(v, 0.25), quantile(v, 0.75)
}

func medians(v []round) (cpu, p99 float64) {
	var a, b []float64
	for _, r := range v {
		a, b = append(a, r.cpu), append(b, r.p99)
	}
	return quantile(a, 0.5), quantile(b, 0.5)
}

// medianInterval is the 95 % confidence interval of a median, by the order
// statistics that lie 1.96 standard deviations of a fair coin's count from it.
func medianInterval(v []float64) (low, high float64) {
	n := float64(len(v))
	if n == 0 {
		return 0, 0
	}
	sorted := slices.Sorted(slices.Values(v))
	reach := 0.98 * math.Sqrt(n)
	return sorted[max(int(math.Floor((n-1)/2-reach)), 0)], sorted[min(int(math.Ceil((n-1)/2+reach)), len(v)-1)]
}

// quantile is 0 of nothing.
func quantile(v []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(v))
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// cpuTime is the time that the threads of a process have run, in nanoseconds.
func cpuTime(pid uint32) (uint64, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(files) == 0 {
		return 0, errors.Join(fmt.Errorf("process %d has no threads", pid), err)
	}
	var sum uint64
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return 0, err
		}
		field, _, _ := strings.Cut(string(b), " ")
		ns, err := strconv.ParseUint(field, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", f, err)
		}
		sum += ns
	}
	return sum, nil
}

// thisMachine describes it as far as it matters here; what cannot be read stays zero.
func thisMachine() machine {
	m := machine{CPUs: hostCPUs}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if b, err := os.ReadFile("/proc/loadavg"); err == nil {
		_, _ = fmt.Sscan(string(b), &m.Load)
	}
	return m
}
