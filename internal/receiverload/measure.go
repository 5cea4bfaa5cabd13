//go:build linux && amd64

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/pprof"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"

	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/pdata/pmetric"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/receivertest"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.uber.org/zap"

	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver"
)

// result is one measurement.
type result struct {
	Name     string            `json:"name"`
	Rate     float64           `json:"requests_per_second"` // achieved
	Asked    int               `json:"requests_answered"`
	Seen     uint64            `json:"requests_recorded"` // kernel.request spans given on
	Spans    uint64            `json:"spans"`
	Sent     map[string]uint64 `json:"records_sent"` // made in the kernel, by kind
	Read     map[string]uint64 `json:"records_read"`
	Lost     map[string]uint64 `json:"records_lost"` // by reason; only those that happened
	CPU      float64           `json:"cpu_cores"`
	PerReq   float64           `json:"cpu_us_per_request"`
	RSS      float64           `json:"rss_mib"`      // at the end
	PeakRSS  float64           `json:"peak_rss_mib"` // since the start of the process
	Heap     float64           `json:"live_heap_mib"`
	Maps     float64           `json:"bpf_maps_mib"`
	Allocs   float64           `json:"allocations_per_request"`
	ClientP  time.Duration     `json:"client_p50_ns"`
	ClientPP time.Duration     `json:"client_p99_ns"`
}

// check says what is wrong with the result: a loss, or a request that is missing.
func (r *result) check() error {
	var errs []error
	for reason, n := range r.Lost {
		errs = append(errs, fmt.Errorf("%s: %d records lost: %s", r.Name, n, reason))
	}
	if r.Seen != uint64(r.Asked) {
		errs = append(errs, fmt.Errorf("%s: %d requests were answered and %d recorded", r.Name, r.Asked, r.Seen))
	}
	return errors.Join(errs...)
}

// under is a receiver under load.
type under struct {
	server    *exec.Cmd
	addr      string
	reader    *sdkmetric.ManualReader
	telemetry *sdkmetric.MeterProvider
	members   []interface {
		Shutdown(context.Context) error
	}
	requests, spans atomic.Uint64
}

// start starts a server, and a receiver that watches it.
func start() (_ *under, err error) {
	u := &under{reader: sdkmetric.NewManualReader()}
	u.telemetry = sdkmetric.NewMeterProvider(sdkmetric.WithReader(u.reader))
	if u.server, u.addr, err = startServer(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, u.stop())
		}
	}()
	factory := ebpfllmreceiver.NewFactory()
	cfg, ok := factory.CreateDefaultConfig().(*ebpfllmreceiver.Config)
	if !ok {
		return nil, errors.New("the factory's configuration is another's")
	}
	cfg.Targets = []ebpfllmreceiver.TargetConfig{{PID: u.server.Process.Pid}}
	set := receivertest.NewNopSettings(factory.Type())
	// not componenttest.NewTelemetry, which keeps a span of each delivery for ever
	set.MeterProvider = u.telemetry
	set.Logger, err = zap.Config{Level: zap.NewAtomicLevelAt(zap.WarnLevel), Encoding: "console", OutputPaths: []string{"stderr"}, EncoderConfig: zap.NewProductionEncoderConfig()}.Build()
	if err != nil {
		return nil, err
	}
	spans, err := consumer.NewTraces(u.count)
	if err != nil {
		return nil, err
	}
	metrics, err := consumer.NewMetrics(func(context.Context, pmetric.Metrics) error { return nil })
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	traces, err := factory.CreateTraces(ctx, set, cfg, spans)
	if err != nil {
		return nil, err
	}
	histograms, err := factory.CreateMetrics(ctx, set, cfg, metrics)
	if err != nil {
		return nil, err
	}
	for _, m := range []receiver.Traces{traces, histograms} {
		if err := m.Start(ctx, componenttest.NewNopHost()); err != nil {
			return nil, err
		}
		u.members = append(u.members, m)
	}
	return u, nil
}

// count counts spans as the next component.
func (u *under) count(_ context.Context, td ptrace.Traces) error {
	for _, rs := range td.ResourceSpans().All() {
		for _, ss := range rs.ScopeSpans().All() {
			for _, s := range ss.Spans().All() {
				u.spans.Add(1)
				if s.Name() == "kernel.request" {
					u.requests.Add(1)
				}
			}
		}
	}
	return nil
}

// stop ends the receiver and the server.
func (u *under) stop() error {
	var errs []error
	for _, m := range u.members {
		errs = append(errs, m.Shutdown(context.Background()))
	}
	_ = u.server.Process.Kill()
	_ = u.server.Wait()
	return errors.Join(append(errs, u.telemetry.Shutdown(context.Background()))...)
}

// counter reads one of the receiver's own metrics, by its attribute; values of
// zero are left out.
func (u *under) counter(name string) (map[string]uint64, error) {
	var all metricdata.ResourceMetrics
	if err := u.reader.Collect(context.Background(), &all); err != nil {
		return nil, err
	}
	values := map[string]uint64{}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if m.Name != "otelcol_receiver_ebpfllm_"+name {
				continue
			}
			sum, ok := m.Data.(metricdata.Sum[int64])
			if !ok {
				return nil, fmt.Errorf("%s is no counter", name)
			}
			for _, p := range sum.DataPoints {
				if kv, ok := p.Attributes.Get(0); ok && p.Value > 0 {
					values[kv.Value.AsString()] = uint64(p.Value)
				}
			}
			return values, nil
		}
	}
	return nil, fmt.Errorf("the receiver has no metric %s", name)
}

// settle is how long the receiver takes at the most to give on what it has read
// and to read its own counters.
const settle = 3 * time.Second

func runMeasure(told string) error {
	var p plan
	if err := json.Unmarshal([]byte(told), &p); err != nil {
		return err
	}
	u, err := start()
	if err != nil {
		return err
	}
	r, err := u.measure(p)
	if err := errors.Join(err, u.stop()); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

func (u *under) measure(p plan) (*result, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var did asked
	done := make(chan error, 1)
	go func() {
		done <- child(ctx, "client", order{Addr: u.addr, Rate: p.Rate, Chunks: p.Chunks, Length: warmUp + p.Length + time.Second}, &did)
	}()
	time.Sleep(warmUp)
	if p.Profile != "" {
		f, err := os.Create(p.Profile)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return nil, err
		}
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	requests, begin, cpu := u.requests.Load(), time.Now(), cpuTime()
	time.Sleep(p.Length)
	cpu, requests = cpuTime()-cpu, u.requests.Load()-requests
	length := time.Since(begin)
	runtime.ReadMemStats(&after)
	if p.Profile != "" {
		pprof.StopCPUProfile()
	}
	if requests == 0 {
		return nil, errors.Join(errors.New("no request was recorded"), cancelled(cancel, done))
	}
	r := &result{
		Name: p.Name, Rate: float64(requests) / length.Seconds(), CPU: cpu.Seconds() / length.Seconds(),
		PerReq: float64(cpu.Microseconds()) / float64(requests), Allocs: float64(after.Mallocs-before.Mallocs) / float64(requests),
	}
	if err := <-done; err != nil {
		return nil, err
	}
	time.Sleep(settle)
	r.Asked, r.ClientP, r.ClientPP = did.Answered, did.P50, did.P99
	r.Seen, r.Spans = u.requests.Load(), u.spans.Load()
	var errs [4]error
	r.Sent, errs[0] = u.counter("records_sent")
	r.Read, errs[1] = u.counter("records")
	r.Lost, errs[2] = u.counter("records_lost")
	var s sample
	s, errs[3] = takeSample()
	r.RSS, r.PeakRSS, r.Heap, r.Maps = s.RSS, s.PeakRSS, s.Heap, s.Maps
	return r, errors.Join(errs[:]...)
}

func cancelled(cancel func(), done chan error) error {
	cancel()
	return <-done
}

// cpuTime is the user and system time of this process so far.
func cpuTime() time.Duration {
	var ru syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &ru); err != nil {
		panic(err) // cannot happen for RUSAGE_SELF
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

func sum(m map[string]uint64) (n uint64) {
	for _, v := range m {
		n += v
	}
	return n
}

// printLoads prints the table as it stands in the documentation.
func printLoads(out io.Writer, rep *report) {
	fmt.Fprintf(out, "Linux %s, %d CPUs, %s\n\n", rep.Machine.Kernel, rep.Machine.CPUs, rep.Machine.Go)
	w := tabwriter.NewWriter(out, 0, 0, 1, ' ', 0)
	fmt.Fprintln(w, "| load \t| requests/s \t| records/s \t| CPU, cores \t| CPU/request \t| allocations/request \t| RSS \t| live heap \t| BPF maps \t| lost \t|")
	fmt.Fprintln(w, "|---\t|---\t|---\t|---\t|---\t|---\t|---\t|---\t|---\t|---\t|")
	for _, r := range rep.Loads {
		records := float64(sum(r.Read)) / float64(r.Asked) * r.Rate
		fmt.Fprintf(w, "| %s \t| %.0f \t| %.0f \t| %.3f \t| %.1f us \t| %.0f \t| %.0f MiB \t| %.1f MiB \t| %.1f MiB \t| %d \t|\n",
			r.Name, r.Rate, records, r.CPU, r.PerReq, r.Allocs, r.RSS, r.Heap, r.Maps, sum(r.Lost))
	}
	w.Flush()
}
