//go:build linux && amd64

package ebpfllmreceiver

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver/receivertest"
	"go.uber.org/zap/zaptest"

	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver/internal/metadata"
)

// These tests run the receiver on the running kernel, through its factory.

func requireRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads programs into the kernel")
	}
}

// TestServerProcess is what a child process of the test does: an HTTP server
// that streams four chunks, 10 ms apart, or at /endless until the client goes.
// As a daemon it leaves the serving to a child, and ends.
func TestServerProcess(t *testing.T) {
	mode := os.Getenv("EBPFLLM_TEST_SERVER")
	if mode == "" {
		t.Skip("is run by other tests, in a process of its own")
	}
	if mode == "daemon" {
		daemonize(t)
		return
	}
	var l net.Listener
	var err error
	if mode == "daemon's child" {
		l, err = net.FileListener(os.NewFile(3, "listener"))
	} else {
		l, err = net.Listen("tcp", "127.0.0.1:0")
		fmt.Println(l.Addr())
	}
	require.NoError(t, err)
	_ = http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		chunks := 4
		if r.URL.Path == "/endless" {
			chunks = 1 << 20
		}
		for range chunks {
			if _, err := io.WriteString(w, "data: x\n\n"); err != nil {
				return
			}
			w.(http.Flusher).Flush()
			time.Sleep(10 * time.Millisecond)
		}
	}))
}

// daemonize listens, hands the socket to a child, and says where and who.
func daemonize(t *testing.T) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	socket, err := l.(*net.TCPListener).File()
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	child := exec.Command(self, "-test.run=^TestServerProcess$")
	child.Env = append(os.Environ(), "EBPFLLM_TEST_SERVER=daemon's child")
	child.ExtraFiles = []*os.File{socket}
	require.NoError(t, child.Start())
	fmt.Println(l.Addr(), child.Process.Pid)
}

// startServer returns the address and the pid of a server process.
func startServer(t *testing.T) (addr string, pid int) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "-test.run=^TestServerProcess$")
	cmd.Env = append(os.Environ(), "EBPFLLM_TEST_SERVER=1", "OTEL_SERVICE_NAME=real-server")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	_, err = fmt.Fscan(out, &addr)
	require.NoError(t, err)
	return addr, cmd.Process.Pid
}

func request(t *testing.T, addr, path, traceparent string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addr+path, strings.NewReader(`{"prompt":"SECRET"}`))
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer SECRET")
	if traceparent != "" {
		req.Header.Set("Traceparent", traceparent)
	}
	res, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, res.Body)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
}

// objects lists the programs, maps and links that this process holds. Other
// programs of the machine have objects of their own.
func objects(t *testing.T) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	files, err := filepath.Glob("/proc/self/fdinfo/*")
	require.NoError(t, err)
	for _, f := range files {
		info, err := os.ReadFile(f)
		if err != nil {
			continue // closed meanwhile
		}
		for line := range strings.Lines(string(info)) {
			key, id, _ := strings.Cut(strings.TrimSpace(line), ":")
			switch key {
			case "prog_id", "map_id", "link_id":
				found[key+" "+strings.TrimSpace(id)] = true
			}
		}
	}
	return found
}

// inKernel lists those of the programs and maps that the kernel still has.
func inKernel(t *testing.T, objects map[string]bool) (left []string) {
	t.Helper()
	for o := range objects {
		kind, id, _ := strings.Cut(o, " ")
		n, err := strconv.ParseUint(id, 10, 32)
		require.NoError(t, err)
		switch kind {
		case "prog_id":
			if p, err := ebpf.NewProgramFromID(ebpf.ProgramID(n)); err == nil {
				left = append(left, o)
				require.NoError(t, p.Close())
			}
		case "map_id":
			if m, err := ebpf.NewMapFromID(ebpf.MapID(n)); err == nil {
				left = append(left, o)
				require.NoError(t, m.Close())
			}
		}
	}
	return left
}

// kernelRequests returns the requests to pid: other servers of the machine may
// be watched too.
func kernelRequests(batches []ptrace.Traces, pid int) (found []ptrace.Span) {
	for _, b := range batches {
		for _, rs := range b.ResourceSpans().All() {
			if got, _ := rs.Resource().Attributes().Get("process.pid"); got.Int() != int64(pid) {
				continue
			}
			for _, ss := range rs.ScopeSpans().All() {
				for _, s := range ss.Spans().All() {
					if s.Name() == requestSpan {
						found = append(found, s)
					}
				}
			}
		}
	}
	return found
}

func TestRealRequestsBecomeSpansAndMetrics(t *testing.T) {
	requireRoot(t)
	addr, pid := startServer(t)
	for _, pipelines := range []string{"traces", "metrics", "traces and metrics"} {
		t.Run(pipelines, func(t *testing.T) {
			set := receivertest.NewNopSettings(metadata.Type)
			set.Logger = zaptest.NewLogger(t)
			cfg := defaults()
			cfg.Targets = []TargetConfig{{PID: pid}}
			cfg.CollectionInterval = 200 * time.Millisecond
			traces, metrics := &consumertest.TracesSink{}, &consumertest.MetricsSink{}
			factory := NewFactory()
			var components []component.Component
			if strings.Contains(pipelines, "traces") {
				r, err := factory.CreateTraces(t.Context(), set, cfg, traces)
				require.NoError(t, err)
				components = append(components, r)
			}
			if strings.Contains(pipelines, "metrics") {
				r, err := factory.CreateMetrics(t.Context(), set, cfg, metrics)
				require.NoError(t, err)
				components = append(components, r)
			}
			for _, c := range components {
				require.NoError(t, c.Start(t.Context(), componenttest.NewNopHost()))
				defer func() { require.NoError(t, c.Shutdown(context.Background())) }()
			}
			for range 5 {
				request(t, addr, "/v1/chat/completions?key=SECRET", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
			}
			if strings.Contains(pipelines, "traces") {
				waitFor(t, func() bool { return len(kernelRequests(traces.AllTraces(), pid)) == 5 })
				for _, s := range kernelRequests(traces.AllTraces(), pid) {
					assert.Equal(t, "0af7651916cd43dd8448eb211c80319c", s.TraceID().String())
					assert.Equal(t, "b7ad6b7169203331", s.ParentSpanID().String())
					a := s.Attributes().AsRaw()
					assert.Equal(t, "/v1/chat/completions", a["url.path"])
					assert.Equal(t, int64(200), a["http.response.status_code"])
					assert.Equal(t, true, a["ebpfllm.response.streaming"])
					assert.Equal(t, "chat", a["gen_ai.operation.name"])
					duration := s.EndTimestamp().AsTime().Sub(s.StartTimestamp().AsTime())
					assert.GreaterOrEqual(t, duration, 30*time.Millisecond)
					assert.Less(t, time.Since(s.EndTimestamp().AsTime()).Abs(), time.Minute, "wall time")
					sum := 0.0
					for name, v := range a {
						if strings.HasPrefix(name, "ebpfllm.stage.") {
							sum += v.(float64)
						}
					}
					assert.InDelta(t, duration.Seconds(), sum, 1e-6)
				}
				raw, err := (&ptrace.JSONMarshaler{}).MarshalTraces(traces.AllTraces()[0])
				require.NoError(t, err)
				assert.NotContains(t, string(raw), "SECRET")
				assert.Contains(t, string(raw), "real-server")
			}
			if strings.Contains(pipelines, "metrics") {
				waitFor(t, func() bool {
					all := metrics.AllMetrics()
					if len(all) == 0 {
						return false
					}
					p := points(all[len(all)-1], "gen_ai.server.time_to_first_token")
					return len(p) == 1 && p[0].Count() == 5
				})
			}
		})
	}
}

func TestRealPipelinesShareTheKernelsObjectsAndLeaveNoneBehind(t *testing.T) {
	requireRoot(t)
	_, pid := startServer(t)
	require.Empty(t, objects(t))
	set := receivertest.NewNopSettings(metadata.Type)
	cfg := defaults()
	cfg.Targets = []TargetConfig{{PID: pid}}
	traces, err := NewFactory().CreateTraces(t.Context(), set, cfg, consumertest.NewNop())
	require.NoError(t, err)
	metrics, err := NewFactory().CreateMetrics(t.Context(), set, cfg, consumertest.NewNop())
	require.NoError(t, err)

	require.NoError(t, traces.Start(t.Context(), componenttest.NewNopHost()))
	assert.Empty(t, objects(t), "the other pipeline is not ready yet")
	require.NoError(t, metrics.Start(t.Context(), componenttest.NewNopHost()))
	loaded := objects(t)
	require.NotEmpty(t, inKernel(t, loaded))
	require.NoError(t, traces.Shutdown(context.Background()))
	assert.Empty(t, objects(t), "one pipeline ends, and with it all")
	require.NoError(t, metrics.Shutdown(context.Background()))
	// the kernel frees objects a moment after their last reference is gone
	for i := 0; len(inKernel(t, loaded)) > 0; i++ {
		require.Less(t, i, 1000, "left in the kernel: %v", inKernel(t, loaded))
		time.Sleep(20 * time.Millisecond)
	}
}

func TestRealShutdownInTheMiddleOfAStream(t *testing.T) {
	requireRoot(t)
	addr, pid := startServer(t)
	sink := &consumertest.TracesSink{}
	cfg := defaults()
	cfg.Targets = []TargetConfig{{PID: pid}}
	tel := componenttest.NewTelemetry()
	set := receivertest.NewNopSettings(metadata.Type)
	set.TelemetrySettings = tel.NewTelemetrySettings()
	r, err := NewFactory().CreateTraces(t.Context(), set, cfg, sink)
	require.NoError(t, err)
	require.NoError(t, r.Start(t.Context(), componenttest.NewNopHost()))

	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addr+"/endless", http.NoBody)
	require.NoError(t, err)
	res, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer res.Body.Close()
	read := func() {
		_, err := io.ReadFull(res.Body, make([]byte, 5*len("data: x\n\n")))
		require.NoError(t, err)
	}
	read()
	for i := 0; ; i++ { // until the request has begun for the receiver
		if _, err := tel.GetMetric("otelcol_receiver_ebpfllm_requests_linked"); err == nil {
			break
		}
		require.Less(t, i, 1000, "no request was seen")
		read()
	}
	read()
	require.NoError(t, r.Shutdown(context.Background()))
	require.NoError(t, tel.Shutdown(context.Background()))
	read() // the server has noticed nothing

	spans := kernelRequests(sink.AllTraces(), pid)
	require.Len(t, spans, 1)
	a := spans[0].Attributes().AsRaw()
	assert.Equal(t, "/endless", a["url.path"])
	assert.Equal(t, true, a["ebpfllm.incomplete"])
	assert.NotEmpty(t, a["ebpfllm.incomplete.reasons"])
}

func TestRealTraceContextThatIsHostileLosesNoRequest(t *testing.T) {
	requireRoot(t)
	addr, pid := startServer(t)
	sink := &consumertest.TracesSink{}
	cfg := defaults()
	cfg.Targets = []TargetConfig{{PID: pid}}
	r, err := NewFactory().CreateTraces(t.Context(), receivertest.NewNopSettings(metadata.Type), cfg, sink)
	require.NoError(t, err)
	require.NoError(t, r.Start(t.Context(), componenttest.NewNopHost()))
	defer func() { require.NoError(t, r.Shutdown(context.Background())) }()

	const valid = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for i, headers := range []string{
		"traceparent: nonsense\r\n",
		"traceparent: " + valid + "\r\nTraceparent: " + valid + "\r\n",
		"traceparent: cc" + valid[2:] + "-" + strings.Repeat("x", 20_000) + "\r\n",
		"TRACEPARENT: " + valid + "\r\n",
	} {
		// a connection of its own: curious headers are not for net/http's client
		conn, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		_, err = fmt.Fprintf(conn, "GET /%d HTTP/1.1\r\nHost: a\r\nConnection: close\r\n%s\r\n", i, headers)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, conn)
		require.NoError(t, err)
		require.NoError(t, conn.Close())
	}
	waitFor(t, func() bool { return len(kernelRequests(sink.AllTraces(), pid)) == 4 })
	for _, s := range kernelRequests(sink.AllTraces(), pid) {
		path, _ := s.Attributes().Get("url.path")
		method, _ := s.Attributes().Get("ebpfllm.link.method")
		if path.Str() == "/3" {
			assert.Equal(t, "traceparent", method.Str())
			assert.Equal(t, "b7ad6b7169203331", s.ParentSpanID().String())
		} else {
			assert.Equal(t, "none", method.Str(), path.Str())
			assert.Equal(t, ptrace.SpanKindServer, s.Kind())
		}
	}
}

func TestRealServerIsFoundWithoutConfiguration(t *testing.T) {
	requireRoot(t)
	addr, pid := startServer(t)
	sink := &consumertest.TracesSink{}
	set := receivertest.NewNopSettings(metadata.Type)
	set.Logger = zaptest.NewLogger(t)
	r, err := NewFactory().CreateTraces(t.Context(), set, defaults(), sink)
	require.NoError(t, err)
	require.NoError(t, r.Start(t.Context(), componenttest.NewNopHost()))
	defer func() { require.NoError(t, r.Shutdown(context.Background())) }()
	request(t, addr, "/health", "")
	for i := 0; len(kernelRequests(sink.AllTraces(), pid)) == 0; i++ {
		require.Less(t, i, 500, "no request was seen")
		request(t, addr, "/v1/chat/completions", "") // the first one finds the server, later ones are measured
	}
	for _, s := range kernelRequests(sink.AllTraces(), pid) {
		assert.Equal(t, ptrace.SpanKindServer, s.Kind())
		path, _ := s.Attributes().Get("url.path")
		assert.Equal(t, "/v1/chat/completions", path.Str())
	}
}

// The parent that began to listen is gone before the receiver can look at it.
// A rescan would find the child by itself after half a minute; that this takes
// less is what the bound on the requests, each of some 40 ms, stands for.
func TestRealDaemonIsFoundBeforeTheNextRegularRescan(t *testing.T) {
	requireRoot(t)
	sink := &consumertest.TracesSink{}
	r, err := NewFactory().CreateTraces(t.Context(), receivertest.NewNopSettings(metadata.Type), defaults(), sink)
	require.NoError(t, err)
	require.NoError(t, r.Start(t.Context(), componenttest.NewNopHost()))
	defer func() { require.NoError(t, r.Shutdown(context.Background())) }()

	self, err := os.Executable()
	require.NoError(t, err)
	parent := exec.Command(self, "-test.run=^TestServerProcess$")
	parent.Env = append(os.Environ(), "EBPFLLM_TEST_SERVER=daemon")
	out, err := parent.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, parent.Start())
	var addr string
	var pid int
	_, err = fmt.Fscan(out, &addr, &pid)
	require.NoError(t, err)
	daemon, err := os.FindProcess(pid)
	require.NoError(t, err)
	t.Cleanup(func() { _ = daemon.Kill() })
	require.NoError(t, parent.Wait())

	for i := 0; len(kernelRequests(sink.AllTraces(), pid)) == 0; i++ {
		require.Less(t, i, 500, "no request was seen")
		request(t, addr, "/v1/chat/completions", "")
	}
}

func TestWithoutPrivilegesTheMissingCapabilityIsNamed(t *testing.T) {
	requireRoot(t) // to be able to give the privileges up
	if os.Getenv("EBPFLLM_TEST_UNPRIVILEGED") != "" {
		r, err := NewFactory().CreateTraces(t.Context(), receivertest.NewNopSettings(metadata.Type), defaults(), consumertest.NewNop())
		require.NoError(t, err)
		fmt.Println("start:", r.Start(t.Context(), componenttest.NewNopHost()))
		require.NoError(t, r.Shutdown(context.Background()))
		return
	}
	setpriv, err := exec.LookPath("setpriv")
	if err != nil {
		t.Skip("needs setpriv (util-linux) to give up capabilities")
	}
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(setpriv, "--bounding-set=-all", "--inh-caps=-all", self, "-test.run=^TestWithoutPrivilegesTheMissingCapabilityIsNamed$")
	cmd.Env = append(os.Environ(), "EBPFLLM_TEST_UNPRIVILEGED=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.Contains(t, string(out), "missing CAP_BPF and CAP_PERFMON")
	assert.True(t, bytes.Contains(out, []byte("setcap")), "and the remedy: %s", out)
}
