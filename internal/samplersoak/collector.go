package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/distribution"
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
`

// collector is the distribution under load.
type collector struct {
	*distribution.Collector
	otlp string // where it takes spans over HTTP
}

func startCollector(ctx context.Context, path, dir, backEnd string) (*collector, error) {
	otlp, err := process.FreeAddress()
	if err != nil {
		return nil, err
	}
	c, err := distribution.Start(ctx, "the collector", filepath.Join(dir, "collector.log"), nil, nil, path,
		"yaml:"+fmt.Sprintf(config, otlp, bufferMiB, backEnd))
	if err != nil {
		return nil, err
	}
	return &collector{c, otlp}, nil
}

// own is what the names of the processor's metrics begin with.
const own = "processor_spike_sampling_"

const mib = 1 << 20

// sample notes what the collector holds.
func (c *collector) sample(ctx context.Context, rep *report, at time.Duration) error {
	all, err := c.Metrics(ctx)
	if err != nil {
		return err
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.PID()))
	if err != nil {
		return err
	}
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return errors.New("the collector has ended: " + c.Tail())
	}
	kib, err := strconv.ParseFloat(fields[0], 64)
	if err != nil {
		return fmt.Errorf("the collector's resident memory: %w", err)
	}
	s := sample{At: at, Resident: kib / 1024, Buffer: all.Sum(own+"buffer_usage", "") / mib} // 0 before the first step
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
	return c.WaitFor(ctx, "done with its decisions", func() bool {
		time.Sleep(2 * time.Second)
		all, err := c.Metrics(ctx)
		if err != nil || all.Sum(own+"traces_buffered", "") > 0 || all.Sum("exporter_queue_size", "") > 0 {
			return false
		}
		last := sent
		sent = all.Sum("exporter_sent_spans", "")
		return sent == last
	})
}

// account notes what the collector says of what it did.
func (c *collector) account(ctx context.Context, rep *report) error {
	all, err := c.Metrics(ctx)
	if err != nil {
		return err
	}
	rep.Decided = int(all.Sum(own+"traces_decided", ""))
	rep.Sampled = int(all.Sum(own+"traces_decided", `decision="sampled"`))
	rep.DecidedEarly = int(all.Sum(own+"traces_decided_early", ""))
	rep.Late = int(all.Sum(own+"spans_late", ""))
	rep.CPU = all.Sum("process_cpu_seconds", "")
	lost := []string{own + "spans_dropped", own + "downstream_errors", "exporter_send_failed_spans", "exporter_enqueue_failed_spans"}
	for _, m := range all {
		// What is refused is sent again.
		if m.Value != 0 && slices.Contains(lost, m.Name) && !strings.Contains(m.Labels, `reason="refused"`) {
			rep.Losses = append(rep.Losses, m.String())
		}
	}
	return nil
}
