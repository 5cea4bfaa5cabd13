//go:build backends

package backendtest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/distribution"
)

// A request that waits for a held lock, among many that do not, is in Jaeger as
// one tree of application and kernel spans; the others are not; and
// VictoriaMetrics has counted them all.
func TestKeptTracesInJaegerAndMetricsInVictoriaMetrics(t *testing.T) {
	require.Zero(t, os.Geteuid(), "this test reads kernel events; run it as root")
	victoria := startVictoriaMetrics(t)
	jaeger := startJaeger(t)
	otlp := startCollector(t, jaeger, victoria)
	server := startServer(t, otlp)

	// The first request finds the server; those until it is tracked are not counted.
	count := func() float64 { return victoria.value(t, `sum({__name__="ebpfllm.request.duration_count"})`) }
	require.Eventually(t, func() bool { server.chat(t); return count() > 0 }, time.Minute, 100*time.Millisecond)
	before := 0.0
	require.Eventually(t, func() bool {
		last := before
		before = count()
		return before == last // and no more of those are to come: collected every second
	}, time.Minute, 2*time.Second)

	const normal, spiked = 250, 5
	var dropped, kept []string
	for range normal {
		dropped = append(dropped, server.chat(t))
	}
	for range spiked {
		release := server.holdLock(t)
		time.AfterFunc(400*time.Millisecond, release)
		kept = append(kept, server.chat(t))
		for range 5 {
			dropped = append(dropped, server.chat(t))
		}
	}

	for _, id := range kept {
		var spans []span
		if !assert.Eventually(t, func() bool {
			spans = jaeger.trace(t, id)
			return find(spans, "kernel.request") != nil && find(spans, "lock") != nil
		}, time.Minute, 500*time.Millisecond) {
			require.FailNow(t, "the trace of a request that waited for the lock is not whole in Jaeger", "trace %s holds %q", id, names(spans))
		}
		assertOneTree(t, spans)

		request, lock := find(spans, "kernel.request"), find(spans, "lock")
		entry := byID(spans, request.parent())
		require.NotNil(t, entry, "kernel.request hangs in the air: %v", names(spans))
		assert.Equal(t, "llmserver", entry.service)
		assert.Equal(t, "traceparent", request.tag("ebpfllm.link.method"))
		assert.Equal(t, "lock", lock.tag("ebpfllm.stage"))
		assert.NotEmpty(t, request.tag("spike.reason"))
		assert.Equal(t, "lock", request.tag("spike.stage"))
		assert.InDelta(t, 0.4, request.tag("ebpfllm.stage.lock"), 0.1, "seconds in the lock")
	}

	// The decisions on the normal requests are older than those on the last
	// spiked one. The machine may stall one or the other for real.
	leaked := 0
	for _, id := range dropped {
		if len(jaeger.trace(t, id)) > 0 {
			leaked++
		}
	}
	assert.LessOrEqual(t, leaked, len(dropped)/20, "normal requests in Jaeger")

	counted := 0.0
	if !assert.Eventually(t, func() bool {
		counted = count() - before
		return counted >= normal+spiked*6
	}, time.Minute, 500*time.Millisecond) {
		require.FailNow(t, "requests are missing in VictoriaMetrics", "%v of %d", counted, normal+spiked*6)
	}
	// The counts of the first requests may come after those of the last were waited for: VictoriaMetrics shows what it
	// gets when it gets round to it.
	inLock := 0.0
	assert.Eventually(t, func() bool {
		inLock = victoria.value(t, `sum({__name__="ebpfllm.request.stage.duration_sum","ebpfllm.stage"="lock"})`)
		return inLock >= spiked*0.4-0.5
	}, time.Minute, 500*time.Millisecond, "seconds in the lock over all requests")
	assert.InDelta(t, spiked*0.4, inLock, 0.5, "seconds in the lock over all requests")
	assert.Positive(t, victoria.value(t, `sum({__name__="gen_ai.server.request.duration_count"})`))
}

// assertOneTree checks that every span but one has its parent in the trace; the
// one's parent is the client's span, which nobody sends.
func assertOneTree(t *testing.T, spans []span) {
	t.Helper()
	var roots []string
	for _, s := range spans {
		if byID(spans, s.parent()) == nil {
			roots = append(roots, s.Name)
		}
	}
	assert.Len(t, roots, 1, "roots of %v", names(spans))
}

type victoriaMetrics struct{ base string }

func startVictoriaMetrics(t *testing.T) victoriaMetrics {
	t.Helper()
	addr := freeAddr(t)
	p := start(t, "victoria-metrics", backend(t, "victoria-metrics"), nil,
		"-httpListenAddr="+addr, "-storageDataPath="+filepath.Join(t.TempDir(), "data"),
		// Else new samples hide for 30 s.
		"-search.latencyOffset=0s")
	v := victoriaMetrics{"http://" + addr}
	answers(t, p, v.base+"/health")
	return v
}

// value returns the newest value of a query that gives one number; 0 if there
// is none yet.
func (v victoriaMetrics) value(t *testing.T, query string) float64 {
	t.Helper()
	var answer struct {
		Status string
		Data   struct {
			Result []struct{ Value [2]any }
		}
	}
	getJSON(t, v.base+"/api/v1/query?query="+url.QueryEscape(query), &answer)
	require.Equal(t, "success", answer.Status)
	if len(answer.Data.Result) == 0 {
		return 0
	}
	require.Len(t, answer.Data.Result, 1, "results of %s", query)
	var value float64
	_, err := fmt.Sscan(answer.Data.Result[0].Value[1].(string), &value)
	require.NoError(t, err)
	return value
}

type jaeger struct{ otlp, query string }

func startJaeger(t *testing.T) jaeger {
	t.Helper()
	j := jaeger{otlp: freeAddr(t), query: freeAddr(t)}
	args := []string{"--collector.otlp.grpc.host-port=" + j.otlp, "--query.http-server.host-port=" + j.query}
	for _, flag := range []string{
		"collector.otlp.http.host-port", "collector.grpc-server.host-port", "collector.http-server.host-port",
		"query.grpc-server.host-port", "admin.http.host-port",
	} {
		args = append(args, "--"+flag+"="+freeAddr(t))
	}
	p := start(t, "jaeger", backend(t, "jaeger"), []string{"SPAN_STORAGE_TYPE=memory", "OTEL_TRACES_SAMPLER=always_off"},
		// Its own spans would go to port 4317, where nobody is.
		append(args, "--query.enable-tracing=false")...)
	answers(t, p, "http://"+j.query+"/api/services")
	return j
}

// span is a span as Jaeger's API gives it.
type span struct {
	ID         string `json:"spanID"`
	Name       string `json:"operationName"`
	Process    string `json:"processID"`
	References []struct {
		Type string `json:"refType"`
		ID   string `json:"spanID"`
	}
	Tags []struct {
		Key   string
		Value any
	}
	service string
}

// trace returns a trace's spans, none if Jaeger does not have it.
func (j jaeger) trace(t *testing.T, id string) []span {
	t.Helper()
	var answer struct {
		Data []struct {
			Spans     []span
			Processes map[string]struct{ ServiceName string }
		}
	}
	getJSON(t, "http://"+j.query+"/api/traces/"+id, &answer)
	var spans []span
	for _, trace := range answer.Data {
		for _, s := range trace.Spans {
			s.service = trace.Processes[s.Process].ServiceName
			spans = append(spans, s)
		}
	}
	return spans
}

func (s span) parent() string {
	for _, r := range s.References {
		if r.Type == "CHILD_OF" {
			return r.ID
		}
	}
	return ""
}

func (s span) tag(key string) any {
	for _, tag := range s.Tags {
		if tag.Key == key {
			return tag.Value
		}
	}
	return nil
}

func find(spans []span, name string) *span {
	for i := range spans {
		if spans[i].Name == name {
			return &spans[i]
		}
	}
	return nil
}

func byID(spans []span, id string) *span {
	for i := range spans {
		if spans[i].ID == id {
			return &spans[i]
		}
	}
	return nil
}

func names(spans []span) []string {
	var all []string
	for _, s := range spans {
		all = append(all, s.Name)
	}
	return all
}

// startCollector runs the distribution with the committed configurations of
// both back ends, and returns the address of its OTLP receiver over HTTP.
func startCollector(t *testing.T, j jaeger, v victoriaMetrics) string {
	t.Helper()
	grpc, http := freeAddr(t), freeAddr(t)
	c, err := distribution.Start(t.Context(), "collector", filepath.Join(t.TempDir(), "collector.log"), nil,
		[]string{
			"OTLP_GRPC_ENDPOINT=" + grpc, "OTLP_HTTP_ENDPOINT=" + http,
			"JAEGER_ENDPOINT=" + j.otlp, "VICTORIAMETRICS_ENDPOINT=" + v.base,
		},
		collector(t), "../../examples/jaeger/config.yaml", "../../examples/victoriametrics/config.yaml",
		// What the examples leave at defaults that are long for a test.
		"yaml:receivers::ebpfllm::collection_interval: 1s",
		"yaml:processors::spike_sampling::decision_wait_after_root_received: 1s")
	require.NoError(t, err)
	untilTheEnd(t, c.Process)
	return http
}

// server is examples/llmserver.
type server struct{ addr, dir string }

func startServer(t *testing.T, otlp string) server {
	t.Helper()
	s := server{addr: freeAddr(t), dir: t.TempDir()}
	p := start(t, "llmserver", buildServer(t),
		[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://" + otlp},
		"-listen", s.addr, "-dir", s.dir)
	answers(t, p, "http://"+s.addr+"/healthz")
	return s
}

// chat makes one streaming request with a trace context of its own, reads it to
// its end, and returns the trace id.
func (s server) chat(t *testing.T) string {
	t.Helper()
	id := fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64()|1)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.addr+"/v1/chat/completions",
		strings.NewReader(`{"model":"tiny-experts","stream":true,"max_tokens":8,"messages":[{"role":"user","content":"why is it slow"}]}`))
	require.NoError(t, err)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Traceparent", fmt.Sprintf("00-%s-%016x-01", id, rand.Uint64()|1))
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, response.StatusCode, string(body))
	return id
}

// holdLock takes the lock that the server saves its state under, until release.
func (s server) holdLock(t *testing.T) (release func()) {
	t.Helper()
	lock, err := os.OpenFile(filepath.Join(s.dir, "slot.lock"), os.O_RDWR, 0)
	require.NoError(t, err)
	require.NoError(t, syscall.Flock(int(lock.Fd()), syscall.LOCK_EX))
	return func() { lock.Close() }
}

func getJSON(t *testing.T, address string, into any) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, http.NoBody)
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.Contains(t, []int{http.StatusOK, http.StatusNotFound}, response.StatusCode, string(body))
	require.NoError(t, json.Unmarshal(body, into), string(body))
}
