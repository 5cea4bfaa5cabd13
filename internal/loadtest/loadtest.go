// Package loadtest runs the distribution against a real server under load: it
// starts both, sends normal requests and delayed ones, and compares the traces
// that were kept with what was done to the requests. The demo prints its report;
// the acceptance test holds it to numbers.
//
// The delays are things that happen to servers: their weights leave the page
// cache, another process takes their CPU or holds a lock, a signal stops them, a
// client reads slowly. Nothing in the server or the collector knows of them.
package loadtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/distribution"
	"github.com/ebpfllm/ebpfllm/internal/process"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// Options say what to run.
type Options struct {
	Collector string // path of the distribution
	Server    string // LLMServer or LlamaCPP
	// Uninstrumented servers and clients know of no traces: the receiver opens
	// them.
	Uninstrumented bool

	Out    string // directory for spikes.jsonl and the logs
	WarmUp int    // normal requests before the first spike
	Normal int    // normal requests among the spikes
	Spikes int
	Kinds  []stage.Stage // faults to inject; all that the server can suffer if there are none
	Delay  time.Duration // length of a fault, where it can be chosen
	Log    io.Writer     // progress, in lines
}

// cpus divides the CPUs once per process, as it confines the process itself.
var cpus = sync.OnceValues(func() (c struct {
	server int
	rest   []int
}, err error,
) {
	if os.Geteuid() != 0 {
		return c, errors.New("must run as root, as the receiver loads eBPF programs and the faults act on other processes: run it with sudo")
	}
	c.server, c.rest, err = process.SplitCPUs()
	if err != nil {
		return c, err
	}
	return c, process.Favour(os.Getpid(), c.rest...)
})

// Run does the whole run and leaves nothing running. An error means that it could
// not be carried out; whether the outcome is good is the report's to tell.
func Run(ctx context.Context, o Options) (_ *Report, err error) {
	c, err := cpus()
	if err != nil {
		return nil, err
	}
	if err := distribution.Check(o.Collector); err != nil {
		return nil, err
	}
	possible := faultsOf(o.Server)
	if len(o.Kinds) == 0 {
		o.Kinds = possible
	}
	for _, kind := range o.Kinds {
		if !slices.Contains(possible, kind) {
			return nil, fmt.Errorf("nothing here delays %s by %s: choose from %v", o.Server, kind, possible)
		}
	}
	if err := os.MkdirAll(o.Out, 0o755); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "ebpfllm-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	progress := func(format string, arguments ...any) { fmt.Fprintf(o.Log, format+"\n", arguments...) }

	progress("building %s", o.Server)
	program, err := build(ctx, o.Server, dir)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	progress("starting the collector and, on CPU %d alone, the server", c.server)
	out, err := filepath.Abs(filepath.Join(o.Out, "spikes.jsonl"))
	if err != nil {
		return nil, err
	}
	address, err := process.FreeAddress()
	if err != nil {
		return nil, err
	}
	col, err := startCollector(ctx, o.Collector, o.Out, out, filepath.Base(program.path), address, c.rest)
	if err != nil {
		return nil, err
	}
	stopCollector := sync.OnceValue(col.Stop)
	defer func() { err = errors.Join(err, stopCollector()) }()
	var args []string
	if o.Uninstrumented {
		args = append(args, "-uninstrumented")
	}
	srv, err := startServer(ctx, program, address, c.server, o.Out, []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + col.endpoint}, args...)
	if err != nil {
		return nil, err
	}
	stopServer := sync.OnceValue(srv.process.Stop)
	defer func() { err = errors.Join(err, stopServer()) }()

	r := &rig{server: srv, client: newClient(srv.url, !o.Uninstrumented), delay: o.Delay}
	defer r.client.close()
	loadBegan := time.Now()
	requests, err := r.load(ctx, o, progress)
	if err != nil {
		return nil, err
	}
	progress("waiting for the last decisions")
	decisionBegan := time.Now()
	if err := col.waitForDecisions(ctx); err != nil {
		return nil, err
	}
	losses, err := col.losses(ctx)
	if err != nil {
		return nil, err
	}
	decided := time.Now()
	if err := errors.Join(stopServer(), stopCollector()); err != nil {
		return nil, err
	}
	traces, err := readTraces(out)
	if err != nil {
		return nil, err
	}
	report := judge(requests, traces)
	report.Losses = losses
	report.load, report.decision, report.total = decisionBegan.Sub(loadBegan), decided.Sub(decisionBegan), time.Since(began)
	return report, nil
}

// load sends the warm-up and then the plan, one request after the other.
func (r *rig) load(ctx context.Context, o Options, progress func(string, ...any)) (requests []*Request, err error) {
	progress("warming up: %d normal requests", o.WarmUp)
	var usual []time.Duration
	for _, s := range plan(o.WarmUp, 0, r.server.size, nil) {
		q, err := r.client.do(ctx, s.request, nil)
		if err != nil {
			return nil, fmt.Errorf("normal request %d: %w", len(requests)+1, err)
		}
		requests = append(requests, &Request{sent: q})
		// One like those that will be delayed, every now and then.
		if len(requests)%20 == 0 {
			q, err := r.client.do(ctx, streamed(r.server.size), nil)
			if err != nil {
				return nil, fmt.Errorf("normal request %d: %w", len(requests)+1, err)
			}
			requests = append(requests, &Request{sent: q})
			usual = append(usual, q.Latency)
		}
	}
	if len(usual) == 0 {
		return nil, errors.New("the warm-up is too short: it needs 20 requests at least")
	}
	slices.Sort(usual)
	r.usual = usual[len(usual)/2]
	var all []time.Duration
	for _, q := range requests {
		all = append(all, q.Latency)
	}
	slices.Sort(all)
	r.contention = max(r.delay, min(3*all[len(all)*99/100], 500*time.Millisecond))

	progress("a streamed answer takes %s; now %d normal requests with %d spikes of %s, of %s for the CPU",
		milliseconds(r.usual), o.Normal, o.Spikes, milliseconds(r.delay), milliseconds(r.contention))
	for _, s := range plan(o.Normal, o.Spikes, r.server.size, o.Kinds) {
		if s.fault == stage.Unknown {
			q, err := r.client.do(ctx, s.request, nil)
			if err != nil {
				return nil, fmt.Errorf("normal request: %w", err)
			}
			requests = append(requests, &Request{sent: q})
			continue
		}
		tried, err := r.inject(ctx, s)
		if err != nil {
			return nil, err
		}
		requests = append(requests, tried...)
	}
	return requests, nil
}

// inject sends a request and delays it. Where that did not work, it is tried
// again: the last request is the delayed one.
func (r *rig) inject(ctx context.Context, s step) (tried []*Request, err error) {
	const attempts = 5
	for range attempts {
		q, err := r.strike(ctx, s)
		if err != nil {
			return nil, fmt.Errorf("request with %s: %w", s.fault, err)
		}
		tried = append(tried, q)
		if !q.Missed && !q.Disturbed {
			return tried, nil
		}
	}
	last := tried[attempts-1]
	if last.Missed {
		return nil, fmt.Errorf("%s: in %d attempts it came too late to delay the server", s.fault, attempts)
	}
	last.Disturbed = false // on this machine it does not get better: it has to do
	return tried, nil
}

// strike sends a request and delays it. If the fault came too late to delay it,
// the request is a normal one.
func (r *rig) strike(ctx context.Context, s step) (*Request, error) {
	before, err := process.RunDelay(r.server.process.PID())
	if err != nil {
		return nil, err
	}
	q, taken, err := faults[s.fault].strike(ctx, r, s.request)
	if err != nil {
		return nil, err
	}
	after, err := process.RunDelay(r.server.process.PID())
	if err != nil {
		return nil, err
	}
	if taken < MinStall {
		return &Request{sent: q, Missed: true}, nil
	}
	// The delay in the run queue is the fault, or else may outweigh it.
	disturbed := s.fault != stage.RunQueue && after-before > taken/2
	return &Request{sent: q, Fault: s.fault, Lone: s.lone, Taken: taken, Disturbed: disturbed}, nil
}
