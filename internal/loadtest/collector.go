package loadtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/distribution"
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
      - {executable: %[2]s, ports: [%[5]s]}
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
    metrics: {level: detailed}
`

// collector is a running distribution with both components, which writes the
// traces it keeps to a file.
type collector struct {
	*distribution.Collector
	endpoint string // for OTLP over HTTP
}

// startCollector starts the distribution at path. It watches the executable that
// serves at the given address, and writes to the file out.
func startCollector(ctx context.Context, path, dir, out, executable, address string, cpus []int) (*collector, error) {
	otlp, err := process.FreeAddress()
	if err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	// The file exporter appends.
	if err := os.Remove(out); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	config := filepath.Join(dir, "collector.yaml")
	text := fmt.Sprintf(collectorConfig, otlp, executable, MinStall, strconv.Quote(out), port)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	c, err := distribution.Start(ctx, "the collector", filepath.Join(dir, "collector.log"), cpus, nil, path, config)
	if err != nil {
		return nil, err
	}
	return &collector{c, "http://" + otlp}, nil
}

// waitForDecisions returns when the processor holds no trace any more.
func (c *collector) waitForDecisions(ctx context.Context) error {
	deadline, cancel := context.WithTimeoutCause(ctx, 2*decisionTime, fmt.Errorf("%s passed", 2*decisionTime))
	defer cancel()
	none := 0
	decided := func() bool {
		const buffered = "processor_spike_sampling_traces_buffered"
		all, err := c.Metrics(deadline)
		told := slices.ContainsFunc(all, func(m distribution.Metric) bool { return m.Name == buffered })
		if err != nil || !told || all.Sum(buffered, "") != 0 {
			none = 0
			return false
		}
		// The last spans may still be on their way, from an exporter that sends
		// every 200 ms and a receiver that polls every 50: ask for half a second.
		none++
		return none > 25
	}
	return c.WaitFor(deadline, "done with its decisions", decided)
}

// losses are the collector's own counters of things that went wrong and are not
// zero, each with its labels.
func (c *collector) losses(ctx context.Context) ([]string, error) {
	bad := []string{
		"_ebpfllm_records_lost", "_ebpfllm_map_full", "_ebpfllm_messages_unparsed",
		"_spike_sampling_traces_decided_early", "_spike_sampling_spans_dropped", "_spike_sampling_downstream_errors",
		"_refused_spans", "_failed_spans", "send_failed_spans",
	}
	all, err := c.Metrics(ctx)
	var found []string
	for _, m := range all {
		if m.Value != 0 && slices.ContainsFunc(bad, func(b string) bool { return strings.Contains(m.Name, b) }) {
			found = append(found, m.String())
		}
	}
	return found, err
}
