// Command samplersoak keeps a collector with the spike_sampling processor under
// load for as long as it is told to: 20,000 spans a second, five times as many in
// one of six stretches of ten seconds, more than the buffer holds then. It fails
// unless
//
//   - the processor's own account of its memory stays within a tenth of its bound,
//     and the process within what a Go program needs for that;
//   - each trace that was sent was decided, and counted, once;
//   - the back end has each trace that was decided to be kept, and no other;
//   - no failed or slow trace is missing there but as many as were decided before
//     they were whole, which is counted too.
//
// The collector is the distribution, in a process of its own, which gets the spans
// over OTLP and sends what it keeps to this program.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/distribution"
)

func main() {
	collector := flag.String("collector", "dist/otelcol-ebpfllm", "the distribution")
	length := flag.Duration("length", 30*time.Minute, "how long")
	out := flag.String("out", "", "write the results to this file as JSON")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "samplersoak: unexpected argument %q\n", flag.Arg(0))
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *collector, *length, *out)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "samplersoak:", err)
		os.Exit(1)
	}
}

// report is what -out holds.
type report struct {
	Time         time.Time     `json:"time"`
	CPUs         int           `json:"cpus"`
	Go           string        `json:"go"`
	Length       time.Duration `json:"length_ns"`
	Spans        int           `json:"spans_sent"`
	Traces       int           `json:"traces_sent"`
	Rate         float64       `json:"spans_per_second"`
	Burst        float64       `json:"spans_per_second_in_bursts"`
	Resent       int           `json:"batches_sent_again"` // the collector had refused them, to be sent later
	Decided      int           `json:"traces_decided"`
	Sampled      int           `json:"traces_sampled"`
	Arrived      int           `json:"traces_at_the_back_end"`
	DecidedEarly int           `json:"traces_decided_early"`
	Late         int           `json:"spans_late"`
	Wanted       int           `json:"traces_to_be_kept"` // failed or slow
	Missing      int           `json:"of_them_missing"`
	Limit        float64       `json:"buffer_limit_mib"`
	Buffer       float64       `json:"buffer_max_mib"`
	Resident     float64       `json:"resident_max_mib"`
	CPU          float64       `json:"collector_cpu_seconds"`
	Losses       []string      `json:"losses"` // counters of spans that were lost, not zero
	Samples      []sample      `json:"samples"`
}

// sample is what the collector held at one time.
type sample struct {
	At       time.Duration `json:"at_ns"` // since the beginning
	Buffer   float64       `json:"buffer_mib"`
	Resident float64       `json:"resident_mib"`
}

// The bounds: the processor's account may be a tenth above its limit, and the
// process take what a garbage collector that lets the heap double needs for the
// account, and for all else: what any collector holds, and 1.1 million remembered
// decisions, which are there after five minutes and take 115 MiB.
const (
	accountShare = 1.1
	heapShare    = 2.2
	restMiB      = 400
)

// slowest is the least rate, as a share of what was asked for, at which the soak is
// one: below, the machine is too slow for it.
const slowest = 0.9

// check tells what is not as it has to be.
func (r *report) check() error {
	var errs []error
	bad := func(holds bool, format string, args ...any) {
		if !holds {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	bad(r.Rate >= slowest*baseRate, "%.0f spans/s were sent, of %d asked for: the machine is too slow or too busy", r.Rate, baseRate)
	if r.Length > burstEvery {
		bad(r.Burst >= slowest*burst*baseRate, "%.0f spans/s were sent in bursts, of %d asked for: the machine is too slow or too busy", r.Burst, burst*baseRate)
	}
	bad(r.Buffer > 0, "the collector never told what its buffer holds")
	bad(r.Buffer <= accountShare*r.Limit, "the buffer held %.1f MiB, its limit is %.0f", r.Buffer, r.Limit)
	resident := heapShare*r.Limit + restMiB
	bad(r.Resident <= resident, "the collector took %.0f MiB, at most %.0f were to be expected", r.Resident, resident)
	bad(r.Decided == r.Traces, "%d traces were sent, %d decided", r.Traces, r.Decided)
	bad(r.Arrived == r.Sampled, "%d traces were to be kept, %d arrived", r.Sampled, r.Arrived)
	bad(r.Missing <= r.DecidedEarly, "%d of %d failed and slow traces are missing, %d were decided early", r.Missing, r.Wanted, r.DecidedEarly)
	for _, loss := range r.Losses {
		errs = append(errs, fmt.Errorf("lost: %s", loss))
	}
	return errors.Join(errs...)
}

func (r *report) print() {
	fmt.Printf("%v: %d spans in %d traces, %.0f spans/s, %.0f in bursts\n", r.Length, r.Spans, r.Traces, r.Rate, r.Burst)
	fmt.Printf("decided %d, of them %d early; sampled %d; arrived %d; late spans %d; batches sent again %d\n",
		r.Decided, r.DecidedEarly, r.Sampled, r.Arrived, r.Late, r.Resent)
	fmt.Printf("failed or slow %d, of them missing %d\n", r.Wanted, r.Missing)
	fmt.Printf("buffer at most %.1f MiB of %.0f, process %.0f MiB; %.0f CPU s\n", r.Buffer, r.Limit, r.Resident, r.CPU)
}

func run(ctx context.Context, path string, length time.Duration, out string) error {
	if length < 10*time.Second {
		return fmt.Errorf("-length is %v: set at least 10s", length)
	}
	if err := distribution.Check(path); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "ebpfllm-samplersoak-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	end, err := startBackEnd()
	if err != nil {
		return err
	}
	defer end.close()
	c, err := startCollector(ctx, path, dir, end.address)
	if err != nil {
		return err
	}
	rep := &report{
		Time: time.Now().UTC().Truncate(time.Second), CPUs: runtime.NumCPU(), Go: runtime.Version(),
		Length: length, Limit: bufferMiB, Samples: []sample{}, Losses: []string{},
	}
	err = soak(ctx, rep, c, end)
	if err := errors.Join(err, c.Stop()); err != nil {
		return err
	}
	rep.print()
	err = rep.check()
	if out != "" {
		err = errors.Join(err, write(out, rep))
	}
	return err
}

func write(path string, rep *report) error {
	b, err := json.MarshalIndent(rep, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// soak sends, samples, waits for the last decision, and balances the account.
func soak(ctx context.Context, rep *report, c *collector, end *backEnd) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l := newLoad("http://" + c.otlp + "/v1/traces")
	begin := time.Now()
	done := make(chan error, 1)
	go func() { done <- l.run(ctx, rep.Length) }()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var err error
	for running := true; running; {
		select {
		case err = <-done:
			running = false
		case <-tick.C:
			if err := c.sample(ctx, rep, time.Since(begin)); err != nil {
				cancel()
				return errors.Join(err, <-done)
			}
		}
	}
	if err != nil {
		return err
	}
	if err := c.waitForDecisions(ctx); err != nil {
		return err
	}
	return errors.Join(c.sample(ctx, rep, time.Since(begin)), c.account(ctx, rep), l.account(rep, end))
}
