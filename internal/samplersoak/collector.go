package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/process"
)

// bufferMiB is the processor's bound: enough for the base rate, too little for a
// burst, so that the bound is what is tested.
const bufferMiB = 192

const config = `receivers:
  otlp:
    protocols:
      http: {endpoint: "%[1]s"}
processors:
  spike_sampling:
    max_buffer_mib: %[2]d
    policies:
      - {name: spikes, type: spike, spike: {max_traces_per_cluster: 0}}
      - {name: errors, type: status_code, status_code: {status_codes: [ERROR]}}
exporters:
  otlp_http:
    endpoint: "http://%[3]s"
    compression: none
service:
  pipelines:
    traces: {receivers: [otlp], processors: [spike_sampling], exporters: [otlp_http]}
  telemetry:
    metrics:
      readers:
        - pull: {exporter: {prometheus: {host: 127.0.0.1, port: %[4]s}}}
`

// collector is the distribution under load.
type collector struct {
	process *process.Process
	otlp    string // where it takes spans over HTTP
	metrics string // URL of its own metrics
}

func startCollector(ctx context.Context, path, dir, backEnd string) (*collector, error) {
	otlp, err := freeAddress()
	if err != nil {
		return nil, err
	}
	metrics, err := freeAddress()
	if err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(metrics)
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "collector.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, config, otlp, bufferMiB, backEnd, port), 0o600); err != nil {
		return nil, err
	}
	cpus := make([]int, runtime.NumCPU())
	for i := range cpus {
		cpus[i] = i
	}
	p, err := process.Start("the collector", filepath.Join(dir, "collector.log"), cpus, nil, path, "--config", file)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 20*time.Second, errors.New("20 s passed"))
	defer cancel()
	ready := func() bool {
		text, err := os.ReadFile(p.Log)
		return err == nil && strings.Contains(string(text), "Everything is ready")
	}
	if err := p.WaitFor(ctx, "ready", ready); err != nil {
		p.Abandon()
		return nil, err
	}
	return &collector{process: p, otlp: otlp, metrics: "http://" + metrics + "/metrics"}, nil
}

// freeAddress returns a loopback address that nobody listens on.
func freeAddress() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}

// metric is one of the collector's own.
type metric struct {
	name   string
	labels string // as Prometheus writes them
	value  float64
}

// read returns the processor's and the exporter's metrics.
func (c *collector) read(ctx context.Context) ([]metric, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, c.metrics, http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	var all []metric
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		i := strings.LastIndexByte(line, ' ')
		name, ok := strings.CutPrefix(line, "otelcol_")
		if !ok || i < 0 {
			continue
		}
		value, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("the collector's metrics: %w", err)
		}
		name, labels, _ := strings.Cut(name[:i-len("otelcol_")], "{")
		name = strings.TrimPrefix(name, "processor_spike_sampling_")
		all = append(all, metric{name, labels, value})
	}
	return all, lines.Err()
}

// sum adds up the values of a metric, with a label if not empty. Counters end in
// _total or not, as the collector's version has it.
func sum(all []metric, name, label string) (total float64) {
	for _, m := range all {
		if (m.name == name || m.name == name+"_total") && strings.Contains(m.labels, label) {
			total += m.value
		}
	}
	return total
}

const mib = 1 << 20

// sample notes what the collector holds.
func (c *collector) sample(ctx context.Context, rep *report, at time.Duration) error {
	all, err := c.read(ctx)
	if err != nil {
		return err
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.process.PID()))
	if err != nil {
		return err
	}
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return errors.New("the collector has ended: " + c.process.Tail())
	}
	kib, err := strconv.ParseFloat(fields[0], 64)
	if err != nil {
		return fmt.Errorf("the collector's resident memory: %w", err)
	}
	i := slices.IndexFunc(all, func(m metric) bool { return strings.HasPrefix(m.name, "buffer_usage") })
	s := sample{At: at, Resident: kib / 1024}
	if i >= 0 { // else before the first step
		s.Buffer = all[i].value / mib
	}
	rep.Samples = append(rep.Samples, s)
	rep.Buffer, rep.Resident = max(rep.Buffer, s.Buffer), max(rep.Resident, s.Resident)
	return nil
}

// waitForDecisions returns when the processor holds no trace and the exporter has
// nothing left to send.
func (c *collector) waitForDecisions(ctx context.Context) error {
	const longest = 90 * time.Second // decision_wait and the time to send
	ctx, cancel := context.WithTimeoutCause(ctx, longest, fmt.Errorf("%v passed", longest))
	defer cancel()
	var sent float64
	return c.process.WaitFor(ctx, "done with its decisions", func() bool {
		time.Sleep(2 * time.Second)
		all, err := c.read(ctx)
		if err != nil || sum(all, "traces_buffered", "") > 0 || sum(all, "exporter_queue_size", "") > 0 {
			return false
		}
		last := sent
		sent = sum(all, "exporter_sent_spans", "")
		return sent == last
	})
}

// account notes what the collector says of what it did.
func (c *collector) account(ctx context.Context, rep *report) error {
	all, err := c.read(ctx)
	if err != nil {
		return err
	}
	rep.Decided = int(sum(all, "traces_decided", ""))
	rep.Sampled = int(sum(all, "traces_decided", `decision="sampled"`))
	rep.DecidedEarly = int(sum(all, "traces_decided_early", ""))
	rep.Late = int(sum(all, "spans_late", ""))
	rep.CPU = sum(all, "process_cpu_seconds", "")
	for _, m := range all {
		// What is refused is sent again.
		if lost := []string{"spans_dropped", "downstream_errors", "exporter_send_failed_spans", "exporter_enqueue_failed_spans"}; m.value != 0 &&
			slices.Contains(lost, strings.TrimSuffix(m.name, "_total")) && !strings.Contains(m.labels, `reason="refused"`) {
			rep.Losses = append(rep.Losses, fmt.Sprintf("%s{%s %g", m.name, m.labels, m.value))
		}
	}
	return nil
}
