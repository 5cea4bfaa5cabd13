// Package distribution runs the built collector, for the tests and tools that need it
// whole: as a process of its own, with a configuration, awaited until it is ready, whose
// own metrics can be read.
package distribution

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/process"
)

// Collector is a running collector.
type Collector struct {
	*process.Process
	metrics string // URL of its own
}

// Check tells what to do if there is no program at path.
func Check(path string) error {
	if info, err := os.Stat(path); err != nil || info.IsDir() {
		return fmt.Errorf("no collector at %s: run `make build`, or name another with -collector", path)
	}
	return nil
}

// Start starts the collector at path and returns when it is ready: within 20 s, or it
// fails. Each config is a location as --config takes it, a file or yaml:TEXT; that of
// its own metrics is added. The rest is as process.Start has it.
func Start(ctx context.Context, name, log string, cpus []int, env []string, path string, configs ...string) (*Collector, error) {
	address, err := process.FreeAddress()
	if err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	configs = append(configs, "yaml:service::telemetry::metrics::readers: [{pull: {exporter: {prometheus: {host: 127.0.0.1, port: "+port+"}}}}]")
	args := make([]string, len(configs))
	for i, config := range configs {
		args[i] = "--config=" + config
	}
	p, err := process.Start(name, log, cpus, env, path, args...)
	if err != nil {
		return nil, err
	}
	c := &Collector{Process: p, metrics: "http://" + address + "/metrics"}
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
	return c, nil
}

// Metric is one value of a collector's own metrics.
type Metric struct {
	Name   string // without otelcol_, and without the _total of counters
	Labels string // as Prometheus writes them, braces included; "" if there are none
	Value  float64
}

func (m Metric) String() string { return fmt.Sprintf("%s%s %g", m.Name, m.Labels, m.Value) }

// Metrics are all of one moment.
type Metrics []Metric

// Metrics reads what the collector tells of itself.
func (c *Collector) Metrics(ctx context.Context) (Metrics, error) {
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
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the collector's metrics: %s answers %s", c.metrics, response.Status)
	}
	return parse(response.Body)
}

func parse(text io.Reader) (all Metrics, err error) {
	lines := bufio.NewScanner(text)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line, ok := strings.CutPrefix(lines.Text(), "otelcol_")
		i := strings.LastIndexByte(line, ' ')
		if !ok || i < 0 {
			continue // a comment, or of the Go runtime
		}
		value, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("the collector's metrics: %q: %w", lines.Text(), err)
		}
		name, labels := line[:i], ""
		if k := strings.IndexByte(name, '{'); k >= 0 {
			name, labels = name[:k], name[k:]
		}
		all = append(all, Metric{strings.TrimSuffix(name, "_total"), labels, value})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("the collector's metrics: %w", err)
	}
	return all, nil
}

// Sum adds up the values of a metric, those with a label (`reason="refused"`) if one is
// given. It is 0 where there are none, as before the first time.
func (all Metrics) Sum(name, label string) (sum float64) {
	for _, m := range all {
		if m.Name == name && strings.Contains(m.Labels, label) {
			sum += m.Value
		}
	}
	return sum
}
