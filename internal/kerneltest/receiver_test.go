//go:build linux && amd64

package kerneltest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/receivertest"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver"
)

// With this in the environment the test binary is a receiver: it watches the
// executable of that name, says "ready", and then each request, a line of JSON,
// until its input ends.
const receiverEnv = "EBPFLLM_KERNELTEST_RECEIVER"

// request is a request's span as the receiver gave it on.
type request struct {
	TraceID, ParentID string
	Resource          map[string]any
	Attributes        map[string]any
	Start, End        time.Time
}

func (r *request) path() string { return r.Attributes["url.path"].(string) }

// pid is that of the process that the request came to.
func (r *request) pid() int64 { return r.Resource["process.pid"].(int64) }

// seconds of a stage; a stage that is not there fails the test, as it does not say 0.
func (r *request) stage(t *testing.T, name string) float64 {
	t.Helper()
	v, ok := r.Attributes["ebpfllm.stage."+name].(float64)
	require.True(t, ok, "%s in %v", name, r.Attributes)
	return v
}

func requestsIn(batch ptrace.Traces) (found []request) {
	for _, rs := range batch.ResourceSpans().All() {
		for _, ss := range rs.ScopeSpans().All() {
			for _, s := range ss.Spans().All() {
				if s.Name() != "kernel.request" {
					continue
				}
				found = append(found, request{
					TraceID: s.TraceID().String(), ParentID: s.ParentSpanID().String(),
					Resource: rs.Resource().Attributes().AsRaw(), Attributes: s.Attributes().AsRaw(),
					Start: s.StartTimestamp().AsTime(), End: s.EndTimestamp().AsTime(),
				})
			}
		}
	}
	return found
}

// newReceiver makes a receiver that watches targets and gives on to next.
func newReceiver(set receiver.Settings, next consumer.Traces, targets ...ebpfllmreceiver.TargetConfig) (receiver.Traces, error) {
	factory := ebpfllmreceiver.NewFactory()
	cfg := factory.CreateDefaultConfig().(*ebpfllmreceiver.Config)
	cfg.Targets = targets
	cfg.RingBufferMiB = 1
	return factory.CreateTraces(context.Background(), set, cfg, next)
}

// collector is the whole receiver at work, and what it gave on.
type collector struct {
	t         *testing.T
	receiver  receiver.Traces
	sink      *consumertest.TracesSink
	telemetry *componenttest.Telemetry
}

// collect starts a receiver that watches targets.
func collect(t *testing.T, targets ...ebpfllmreceiver.TargetConfig) *collector {
	t.Helper()
	c := &collector{t: t, sink: &consumertest.TracesSink{}, telemetry: componenttest.NewTelemetry()}
	set := receivertest.NewNopSettings(component.MustNewType("ebpfllm"))
	set.TelemetrySettings = c.telemetry.NewTelemetrySettings()
	var err error
	c.receiver, err = newReceiver(set, c.sink, targets...)
	require.NoError(t, err)
	require.NoError(t, c.receiver.Start(t.Context(), componenttest.NewNopHost()))
	t.Cleanup(func() {
		c.stop()
		require.NoError(t, c.telemetry.Shutdown(context.Background()))
	})
	return c
}

// stop stops it, once.
func (c *collector) stop() {
	c.t.Helper()
	require.NoError(c.t, c.receiver.Shutdown(context.Background()))
}

// all returns the requests so far, in the order of their beginnings.
func (c *collector) all() (list []request) {
	for _, batch := range c.sink.AllTraces() {
		list = append(list, requestsIn(batch)...)
	}
	slices.SortStableFunc(list, func(a, b request) int { return a.Start.Compare(b.Start) })
	return list
}

// to returns the requests to a path, once there are n of them.
func (c *collector) to(path string, n int) []request {
	c.t.Helper()
	var found []request
	require.Eventually(c.t, func() bool {
		found = slices.DeleteFunc(c.all(), func(r request) bool { return r.path() != path })
		return len(found) >= n
	}, 10*time.Second, 20*time.Millisecond, "requests to %s are missing", path)
	require.Len(c.t, found, n)
	return found
}

// number is the sum of a self-metric's points.
func (c *collector) number(name string) (sum int64) {
	c.t.Helper()
	for _, n := range c.points(name) {
		sum += n
	}
	return sum
}

// points are those of a self-metric, by the first of their attributes.
func (c *collector) points(name string) map[string]int64 {
	c.t.Helper()
	m, err := c.telemetry.GetMetric("otelcol_receiver_ebpfllm_" + name)
	require.NoError(c.t, err)
	var points []metricdata.DataPoint[int64]
	switch data := m.Data.(type) {
	case metricdata.Sum[int64]:
		points = data.DataPoints
	case metricdata.Gauge[int64]:
		points = data.DataPoints
	default:
		require.FailNowf(c.t, "no number", "%s is %T", name, data)
	}
	found := map[string]int64{}
	for _, p := range points {
		var key string
		if a := p.Attributes.ToSlice(); len(a) > 0 {
			key = a[0].Value.AsString()
		}
		found[key] += p.Value
	}
	return found
}

// awaitTargets returns once the receiver watches n targets.
func (c *collector) awaitTargets(n int64) {
	c.t.Helper()
	require.Eventually(c.t, func() bool { return c.number("targets") == n }, 10*time.Second, 20*time.Millisecond, "%d targets are not found", n)
}

// runReceiver is what the test binary does with receiverEnv.
func runReceiver(executable string) error {
	lines := json.NewEncoder(os.Stdout)
	next, err := consumer.NewTraces(func(_ context.Context, batch ptrace.Traces) error {
		var errs []error
		for _, r := range requestsIn(batch) {
			errs = append(errs, lines.Encode(r))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return err
	}
	r, err := newReceiver(receivertest.NewNopSettings(component.MustNewType("ebpfllm")), next, ebpfllmreceiver.TargetConfig{Executable: executable})
	if err != nil {
		return err
	}
	if err := r.Start(context.Background(), componenttest.NewNopHost()); err != nil {
		return err
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, r.Shutdown(context.Background()))
}

// receiverProcess is a receiver in a process of its own.
type receiverProcess struct {
	cmd  *exec.Cmd
	stop io.Closer
	out  *bufio.Scanner
}

// collectElsewhere starts a receiver in a process of its own.
func collectElsewhere(t *testing.T, executable string) *receiverProcess {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), receiverEnv+"="+executable)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	p := &receiverProcess{cmd, in, bufio.NewScanner(out)}
	require.True(t, p.out.Scan(), "the receiver did not come up")
	require.Equal(t, "ready", p.out.Text())
	return p
}

// finish stops the receiver and returns the requests that it gave on.
func (p *receiverProcess) finish(t *testing.T) (list []request) {
	t.Helper()
	require.NoError(t, p.stop.Close())
	for p.out.Scan() {
		var r request
		require.NoError(t, json.Unmarshal(p.out.Bytes(), &r), "%s", p.out.Text())
		list = append(list, r)
	}
	require.NoError(t, p.out.Err())
	require.NoError(t, p.cmd.Wait())
	return list
}

// ask sends a request with a traceparent, on a connection of its own.
func (s *server) ask(path, traceparent string) {
	s.t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, "http://"+s.addr+path, http.NoBody)
	require.NoError(s.t, err)
	req.Header.Set("Traceparent", traceparent)
	r, err := client.Do(req)
	require.NoError(s.t, err)
	defer r.Body.Close()
	_, err = io.Copy(io.Discard, r.Body)
	require.NoError(s.t, err)
}

// startCIn starts the C server as the end of a command line, such as "unshare --pid --fork".
func startCIn(t *testing.T, prefix ...string) *server {
	t.Helper()
	binary, err := compile()
	require.NoError(t, err)
	return start(t, func(port string) *exec.Cmd {
		line := append(slices.Clone(prefix), binary, port, "/dev/null")
		return exec.Command(line[0], line[1:]...)
	})
}

// targetC is the rule that the C server is found by.
func targetC(t *testing.T) ebpfllmreceiver.TargetConfig {
	t.Helper()
	binary, err := compile()
	require.NoError(t, err)
	return ebpfllmreceiver.TargetConfig{Executable: filepath.Base(binary)}
}

// innermost follows the only children of a process to the last of them, and
// returns its pid here and its pids in each of its namespaces.
func innermost(t *testing.T, pid uint32) (uint32, []string) {
	t.Helper()
	for {
		children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
		require.NoError(t, err)
		f := strings.Fields(string(children))
		if len(f) == 0 {
			break
		}
		require.Len(t, f, 1)
		child, err := strconv.ParseUint(f[0], 10, 32)
		require.NoError(t, err)
		pid = uint32(child)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(status), "\nNSpid:")
	line, _, _ := strings.Cut(rest, "\n")
	return pid, strings.Fields(line)
}

// entries counts what is in this process's maps of a name.
func entries(t *testing.T, name string) (n int) {
	t.Helper()
	found := false
	for _, id := range holds(t).maps {
		m, err := ebpf.NewMapFromID(id)
		require.NoError(t, err)
		info, err := m.Info()
		require.NoError(t, err)
		if info.Name == name {
			found = true
			key := make([]byte, info.KeySize)
			var last any
			for m.NextKey(last, &key) == nil {
				n++
				last = key
			}
		}
		require.NoError(t, m.Close())
	}
	require.True(t, found, "no map %s", name)
	return n
}
