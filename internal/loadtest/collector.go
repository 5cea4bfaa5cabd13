package loadtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/process"
)

// MinStall is the shortest delay that is called a spike here: the collector's
// min_excess, well below what the faults take and well above what a request
// normally spends in any stage.
const MinStall = 25 * time.Millisecond

// decisionTime is how long after a request its trace is decided at the latest:
// decision_wait, cluster_wait and two strides, as configured below.
const decisionTime = 8 * time.Second

const collectorConfig = `receivers:
  otlp:
    protocols:
      http: {endpoint: "%[1]s"}
  ebpfllm:
    targets:
      - {executable: %[2]s, ports: [%[6]s]}
    collection_interval: 1s
processors:
  spike_sampling:
    decision_wait: 3s
    decision_wait_after_root_received: 1s
    baseline: {min_excess: %[3]s}
    clustering: {cluster_wait: 2s, stride: 1s}
    policies:
      - {name: spikes, type: spike, spike: {keep_lone: true}}
exporters:
  file:
    path: %[4]s
    flush_interval: 200ms
service:
  pipelines:
    traces: {receivers: [otlp, ebpfllm], processors: [spike_sampling], exporters: [file]}
  telemetry:
    metrics:
      level: detailed
      readers:
        - pull: {exporter: {prometheus: {host: 127.0.0.1, port: %[5]s}}}
`

// collector is a running distribution with both components, which writes the
// traces it keeps to a file.
type collector struct {
	process  *process.Process
	endpoint string // for OTLP over HTTP
	metrics  string // URL of its own metrics
}

// checkCollector tells what to do if there is no program at path.
func checkCollector(path string) error {
	if info, err := os.Stat(path); err != nil || info.IsDir() {
		return fmt.Errorf("no collector at %s: run `make build`, or name another with -collector", path)
	}
	return nil
}

// startCollector starts the distribution at path. It watches the executable that
// serves at the given address, and writes to the file out.
func startCollector(ctx context.Context, path, dir, out, executable, address string, cpus []int) (*collector, error) {
	otlp, err := freeAddress()
	if err != nil {
		return nil, err
	}
	metrics, err := freeAddress()
	if err != nil {
		return nil, err
	}
	_, metricsPort, err := net.SplitHostPort(metrics)
	if err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	config := filepath.Join(dir, "collector.yaml")
	text := fmt.Sprintf(collectorConfig, otlp, executable, MinStall, strconv.Quote(out), metricsPort, port)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	// The file exporter appends.
	if err := os.Remove(out); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	p, err := process.Start("the collector", filepath.Join(dir, "collector.log"), cpus, nil, path, "--config", config)
	if err != nil {
		return nil, err
	}
	c := &collector{process: p, endpoint: "http://" + otlp, metrics: "http://" + metrics + "/metrics"}
	deadline, cancel := context.WithTimeoutCause(ctx, 20*time.Second, errors.New("20 s passed"))
	defer cancel()
	ready := func() bool {
		text, err := os.ReadFile(p.Log)
		return err == nil && strings.Contains(string(text), "Everything is ready")
	}
	if err := p.WaitFor(deadline, "ready", ready); err != nil {
		p.Abandon()
		return nil, err
	}
	return c, nil
}

// waitForDecisions returns when the processor holds no trace any more.
func (c *collector) waitForDecisions(ctx context.Context) error {
	deadline, cancel := context.WithTimeoutCause(ctx, 2*decisionTime, fmt.Errorf("%s passed", 2*decisionTime))
	defer cancel()
	none := 0
	decided := func() bool {
		values, err := c.values(deadline, func(name string) bool {
			return strings.HasPrefix(name, "otelcol_processor_spike_sampling_traces_buffered")
		})
		if err != nil || len(values) == 0 || slices.ContainsFunc(values, func(v metric) bool { return v.value != 0 }) {
			none = 0
			return false
		}
		// The last spans may still be on their way, from an exporter that sends
		// every 200 ms and a receiver that polls every 50: ask for half a second.
		none++
		return none > 25
	}
	return c.process.WaitFor(deadline, "done with its decisions", decided)
}

// losses are the collector's own counters of things that went wrong and are not
// zero, each with its labels.
func (c *collector) losses(ctx context.Context) ([]string, error) {
	bad := []string{
		"_ebpfllm_records_lost", "_ebpfllm_map_full", "_ebpfllm_messages_unparsed",
		"_spike_sampling_traces_decided_early", "_spike_sampling_spans_dropped", "_spike_sampling_downstream_errors",
		"_refused_spans", "_failed_spans", "send_failed_spans",
	}
	values, err := c.values(ctx, func(name string) bool {
		return slices.ContainsFunc(bad, func(b string) bool { return strings.Contains(name, b) })
	})
	var found []string
	for _, v := range values {
		if v.value != 0 {
			found = append(found, fmt.Sprintf("%s %g", v.name, v.value))
		}
	}
	return found, err
}

type metric struct {
	name  string // with labels
	value float64
}

// values reads the collector's own metrics with a matching name.
func (c *collector) values(ctx context.Context, match func(string) bool) ([]metric, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
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
	var found []metric
	scanner := bufio.NewScanner(response.Body)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		line := scanner.Text()
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || line[0] == '#' || !match(line[:i]) {
			continue
		}
		value, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("the collector's metrics: %w", err)
		}
		found = append(found, metric{line[:i], value})
	}
	return found, scanner.Err()
}

// freeAddress returns a loopback address that nobody listens on.
func freeAddress() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}
