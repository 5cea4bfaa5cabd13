package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/process"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// Size is how many requests a run needs.
type Size struct {
	Affected, Unaffected int
	Timeout              time.Duration // of each of the two loads
}

// Sizes of a whole run, and of the one that tests and CI can afford.
var (
	Full  = Size{Affected: 100, Unaffected: 500, Timeout: 90 * time.Second}
	Quick = Size{Affected: 20, Unaffected: 100, Timeout: 20 * time.Second}
)

// Lab runs scenarios.
type Lab struct {
	size   Size
	log    io.Writer
	cpu    int
	others []int
	lock   *os.File
	calm   func() error // gives this session its nice value back
	before priority
}

// lockFile is held by the one lab that runs on this machine: two would share the
// server's CPU, and their figures would be worth nothing.
const lockFile = "/run/ebpfllm-truthlab.lock"

// New waits until no other lab runs, removes what one that was killed has left behind,
// and confines this process to all CPUs but one, which is for the servers. Close undoes it.
func New(ctx context.Context, size Size, log io.Writer) (_ *Lab, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("must run as root, as the receiver loads eBPF programs and the faults act on other processes: run it with sudo")
	}
	l := &Lab{size: size, log: log}
	if l.cpu, l.others, err = process.SplitCPUs(); err != nil {
		return nil, err
	}
	if l.lock, err = os.OpenFile(lockFile, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	if err := l.alone(ctx); err != nil {
		return nil, errors.Join(err, l.lock.Close())
	}
	if err := clearLeftovers(); err != nil {
		return nil, errors.Join(err, l.lock.Close())
	}
	if l.before, err = ownPriority(); err != nil {
		return nil, errors.Join(err, l.lock.Close())
	}
	if l.calm, err = process.KeepSession(os.Getpid()); err != nil {
		return nil, errors.Join(err, l.lock.Close())
	}
	if err := process.Favour(os.Getpid(), l.others...); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// alone waits until no other lab runs.
func (l *Lab) alone(ctx context.Context) error {
	for said := false; ; said = true {
		err := unix.Flock(int(l.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		if !said {
			fmt.Fprintf(l.log, "another truth lab runs on this machine, and holds %s: waiting for its end\n", lockFile)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Close gives this process and its session back what they had, and lets another lab run.
func (l *Lab) Close() error { return errors.Join(l.before.restore(), l.calm(), l.lock.Close()) }

// priority is where and before whom a thread runs.
type priority struct {
	cpus unix.CPUSet
	attr *unix.SchedAttr
}

func ownPriority() (p priority, err error) {
	if err := unix.SchedGetaffinity(0, &p.cpus); err != nil {
		return p, err
	}
	p.attr, err = unix.SchedGetAttr(0, 0)
	return p, err
}

// restore gives it to every thread of this process.
func (p priority) restore() error {
	return process.EachThread(os.Getpid(), func(tid int) error {
		return errors.Join(unix.SchedSetaffinity(tid, &p.cpus), unix.SchedSetAttr(tid, p.attr, 0))
	})
}

// Leftovers of a lab have these names: directories of the working directory, and cgroups.
const (
	leftDirectories = "truthlab-*.tmp"
	leftGroups      = "ebpfllm-truthlab-*"
)

// clearLeftovers removes what a lab that was killed could not. The caller holds the lock.
func clearLeftovers() error {
	var errs []error
	left, err := filepath.Glob(leftDirectories)
	errs = append(errs, err)
	for _, path := range left {
		errs = append(errs, os.RemoveAll(path))
	}
	for _, parent := range []string{"", "*"} {
		left, err := filepath.Glob(filepath.Join("/sys/fs/cgroup", parent, leftGroups))
		errs = append(errs, err)
		for _, path := range left {
			errs = append(errs, os.Remove(path)) // its processes ended with the lab
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("clear what an earlier truth lab has left behind: %w", err)
	}
	return nil
}

// Run runs one scenario. What kept it from being run is in the result.
func (l *Lab) Run(ctx context.Context, s Scenario) *Result {
	began := time.Now()
	err := s.Validate()
	s = s.withDefaults()
	var result *Result
	if err == nil {
		result, err = l.run(ctx, &s)
	}
	if result == nil {
		result = describe(&s)
	}
	var why unavailable
	switch {
	case errors.As(err, &why):
		result.Skipped = why.Error()
	case err != nil:
		result.Error = err.Error()
	}
	result.Seconds = time.Since(began).Seconds()
	result.Time, result.Machine = time.Now().UTC().Truncate(time.Second), machine()
	return result
}

func (l *Lab) run(ctx context.Context, s *Scenario) (result *Result, err error) {
	rig, err := newRig(l.cpu, l.others, s.Length, func(format string, arguments ...any) {
		fmt.Fprintf(l.log, "    "+format+"\n", arguments...)
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil && ctx.Err() == nil {
			err = rig.withOutput(err)
		}
		err = errors.Join(err, rig.close())
	}()
	if err := s.Server.Start(ctx, rig); err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Server.Name, err)
	}
	if s.Setup != nil {
		if err := s.Setup(ctx, rig); err != nil {
			return nil, fmt.Errorf("set up: %w", err)
		}
	}
	var warnings strings.Builder
	o, err := observe(ctx, rig.PIDs, zapcore.Lock(zapcore.AddSync(&warnings)))
	if err != nil {
		return nil, err
	}
	stopped := false
	defer func() {
		if !stopped {
			err = errors.Join(err, o.stop(context.WithoutCancel(ctx)))
		}
	}()
	if err := l.warmUp(ctx, s, rig, o); err != nil {
		return nil, fmt.Errorf("warm up: %w", err)
	}
	paired, err := l.load(ctx, s, rig, false)
	if err != nil {
		return nil, fmt.Errorf("run without the fault: %w", err)
	}
	faulty, err := l.load(ctx, s, rig, true)
	if err != nil {
		return nil, fmt.Errorf("run with the fault: %w", err)
	}
	const quiet = 2 * time.Second // a second is how old the receiver's counters may be
	if err := o.settle(ctx, append(faulty.all(), paired.all()...), quiet); err != nil {
		return nil, err
	}
	<-time.After(quiet / 2)
	lost, err := o.lost()
	if err != nil {
		return nil, err
	}
	stopped = true
	if err := o.stop(ctx); err != nil {
		return nil, err
	}
	if warnings.Len() > 0 {
		rig.Logf("the receiver warns:\n%s", warnings.String())
	}
	result = score(s, faulty, paired, o.of)
	result.Lost = lost
	if s.Shared && len(faulty.sharing) < l.size.Affected {
		err = fmt.Errorf("only %d requests waited with an affected one, and %d are needed", len(faulty.sharing), l.size.Affected)
	} else if n := len(faulty.affected); n < l.size.Affected {
		err = fmt.Errorf("only %d requests were affected within %v, and %d are needed: the fault hardly takes effect, or the load is too small", n, l.size.Timeout, l.size.Affected)
	} else if n := len(faulty.unaffected); n < l.size.Unaffected {
		err = fmt.Errorf("only %d requests were unaffected within %v, and %d are needed", n, l.size.Timeout, l.size.Unaffected)
	}
	return result, err
}

// warmUp asks until the receiver speaks of the requests, so that nothing of the
// beginning is in the figures.
func (l *Lab) warmUp(ctx context.Context, s *Scenario, rig *Rig, o *observer) error {
	for range 50 {
		w := &load{rig: rig, scenario: s}
		loading, stop := context.WithTimeout(ctx, 200*time.Millisecond)
		err := w.run(loading)
		stop()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		if err := o.settle(ctx, w.taken(), 300*time.Millisecond); err != nil {
			return err
		}
		for _, sample := range w.taken() {
			if o.of(sample) != nil {
				return nil
			}
		}
	}
	return errors.New("the receiver sees none of the requests")
}

// outcome is what came of a load: the requests by what was done to them.
type outcome struct {
	affected, unaffected []*Sample
	beside               []*Sample // touched by a fault, but not enough to count
	disturbed            []*Sample // affected, and delayed by the host at least half as long besides
	sharing              []sharing // of those beside
}

// sharing is a request that waited with an affected one for at least MinAffected, on the
// thread that had read both.
type sharing struct {
	with   *Sample
	waited time.Duration
}

func (o *outcome) all() []*Sample {
	return slices.Concat(o.affected, o.unaffected, o.beside, o.disturbed)
}

// setAside moves those affected requests to disturbed whose server was kept from a CPU
// for half of the delay or more (and for minExcess at least), by the scheduler's
// statistics, in a scenario that has nothing to do with that. The host delayed them:
// they prove nothing.
func (o *outcome) setAside(s *Scenario) {
	if s.Inject != nil || s.right(stage.RunQueue.String()) {
		return
	}
	o.affected = slices.DeleteFunc(o.affected, func(x *Sample) bool {
		disturbed := x.Queued >= max(x.Fault/2, duration(minExcess))
		if disturbed {
			o.disturbed = append(o.disturbed, x)
		}
		return disturbed
	})
}

// window is a time in which a fault from outside was in effect.
type window struct{ begin, end time.Time }

// pairedPart: the run without the fault has so many times less requests. It is there for the
// share of them that the host stalls.
const pairedPart = 2

// load puts the server under load until there are enough requests of each sort.
func (l *Lab) load(ctx context.Context, s *Scenario, rig *Rig, faulty bool) (*outcome, error) {
	w := &load{rig: rig, scenario: s, faulty: faulty}
	loading, stop := context.WithTimeout(ctx, l.size.Timeout)
	defer stop()
	var mu sync.Mutex
	var windows []window
	var injection error
	done := make(chan struct{})
	if faulty && s.Inject != nil {
		go func() {
			defer close(done)
			injection = inject(ctx, loading, s, rig, func(w window) { mu.Lock(); windows = append(windows, w); mu.Unlock() })
			if injection != nil {
				stop()
			}
		}()
	} else {
		close(done)
	}
	counted := make(chan struct{})
	go func() { // end the load when there is enough
		defer close(counted)
		for {
			select {
			case <-loading.Done():
				return
			case <-time.After(200 * time.Millisecond):
			}
			mu.Lock()
			o := classify(w.taken(), windows, s)
			mu.Unlock()
			// some more: a fault that is in effect just now is not known yet
			need := l.size.Unaffected * 21 / 20
			if !faulty {
				need /= pairedPart
			}
			if len(o.unaffected) >= need && (!faulty || len(o.affected) >= l.size.Affected) {
				stop()
				return
			}
		}
	}()
	err := w.run(loading)
	stop()
	<-done
	<-counted
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return nil, err
	}
	if injection != nil {
		return nil, fmt.Errorf("inject: %w", injection)
	}
	return classify(w.taken(), windows, s), context.Cause(ctx)
}

// settling is how long after a fault from outside its effects may last: queues
// that it built are worked off.
const settling = 20 * time.Millisecond

// pauseAfter is the least time between two faults from outside of a length.
func pauseAfter(length time.Duration) time.Duration { return 4*length + settling }

// inject calls the scenario's fault again and again, at times that have nothing to
// do with those of the requests.
func inject(ctx, loading context.Context, s *Scenario, rig *Rig, record func(window)) error {
	random := rand.New(rand.NewPCG(1, 2))
	pause := pauseAfter(s.Length)
	for {
		select {
		case <-loading.Done():
			return nil
		case <-time.After(pause + time.Duration(random.Int64N(int64(pause/2)))):
		}
		w := window{begin: time.Now()}
		// not cancelled with the load: a fault that has begun is undone
		if err := s.Inject(ctx, rig, s.Length); err != nil {
			return err
		}
		w.end = time.Now()
		record(w)
	}
}

// moment is how close to a fault's beginning a request has to be sent for it to be unknown
// which of the two the server met first.
const moment = time.Millisecond

// classify sorts requests by what was done to them.
func classify(samples []*Sample, windows []window, s *Scenario) *outcome {
	o := &outcome{}
	for _, x := range samples {
		if s.Inject == nil {
			x.where = fmt.Sprintf("%.1f ms in its fault and %.1f ms queued by the server's account", 1e3*x.Fault.Seconds(), 1e3*x.Queued.Seconds())
			switch {
			case x.Asked:
				o.affected = append(o.affected, x)
			case s.Server.Serial && besideAsked(x, samples):
				o.beside = append(o.beside, x)
			default:
				o.unaffected = append(o.unaffected, x)
			}
			continue
		}
		touched, abreast, held := false, false, time.Duration(0)
		x.where = "before the first fault"
		for _, w := range windows {
			if w.begin.Before(x.End) {
				x.where = fmt.Sprintf("%.1f to %.1f ms after the fault began, which lasted %.1f ms",
					1e3*x.Start.Sub(w.begin).Seconds(), 1e3*x.End.Sub(w.begin).Seconds(), 1e3*w.end.Sub(w.begin).Seconds())
			}
			if x.Start.Before(w.end.Add(settling)) && w.begin.Before(x.End) {
				touched = true
				at := x.End
				if !x.Left.IsZero() {
					at = x.Left
				}
				held = max(held, minTime(at, w.end).Sub(maxTime(x.Start, w.begin)))
				abreast = abreast || x.Start.Sub(w.begin).Abs() < moment
			}
		}
		switch {
		case held >= MinAffected && !abreast:
			o.affected = append(o.affected, x)
		case touched:
			o.beside = append(o.beside, x)
		default:
			o.unaffected = append(o.unaffected, x)
		}
	}
	o.setAside(s)
	if s.Shared {
		for _, x := range o.beside {
			if with, ok := shares(x, o.affected); ok {
				o.sharing = append(o.sharing, with)
			}
		}
	}
	return o
}

// shares tells with which affected request another waited.
func shares(x *Sample, affected []*Sample) (sharing, bool) {
	const read = 5 * time.Millisecond // by which a thread that is idle has read what was sent to it
	for _, a := range affected {
		if waited := minTime(x.End, a.End).Sub(a.Start); !x.Start.Add(read).After(a.Start) && waited >= MinAffected {
			return sharing{x, waited}, true
		}
	}
	return sharing{}, false
}

// besideAsked tells whether a request was in flight together with an affected one,
// or with one that such a one held up.
func besideAsked(x *Sample, samples []*Sample) bool {
	for _, a := range samples {
		begin := a.Start
		if !a.Prepared.IsZero() {
			begin = a.Prepared
		}
		if a.Asked && x.Start.Before(a.End.Add(settling)) && begin.Before(x.End) {
			return true
		}
	}
	return false
}

func minTime(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
