//go:build backends

package backendtest

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"

	"github.com/ebpfllm/ebpfllm/internal/distribution"
)

// A back end that is away while traces are kept: the exporter's queue, or its retries
// alone, bring them when it is back. Without either they are lost, and counted.
func TestWhileTheBackEndIsAwayKeptTracesWaitOrAreCounted(t *testing.T) {
	const n = 50
	for _, tt := range []struct {
		name, exporter string
		lost           bool
	}{
		{"a queue and retries", "retry_on_failure: {initial_interval: 100ms}", false},
		{"retries alone", "sending_queue: {enabled: false}, retry_on_failure: {initial_interval: 100ms}", false},
		{"neither", "sending_queue: {enabled: false}, retry_on_failure: {enabled: false}", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			end := startAwayEnd(t)
			c, send := startKeeper(t, end, "", tt.exporter)
			untilTheEnd(t, c.Process)
			require.NoError(t, send(0, n))
			await(t, "the exporter has been refused", func() bool { return end.refusals() > 0 })
			count := func(name string) float64 {
				all, err := c.Metrics(t.Context())
				require.NoError(t, err)
				return all.Sum("processor_spike_sampling_"+name, "")
			}
			if tt.lost {
				await(t, "each is counted as lost", func() bool { return count("spans_dropped") == n })
				await(t, "and as an error", func() bool { return count("downstream_errors") == n })
				return
			}
			end.comeBack()
			await(t, "all have arrived", func() bool { return end.has(0, n) == n })
			await(t, "none is left", func() bool { return count("traces_buffered") == 0 && count("traces_decided") == n })
			assert.Zero(t, count("downstream_errors"))
			assert.Zero(t, count("spans_dropped"))
		})
	}
}

// The collector is killed by SIGKILL while traces stream in and its back end is away.
// What it had decided to keep arrives once it is started again, out of its storage and
// its exporter's, and it says that others were lost.
func TestKilledInMidStreamNoDecidedTraceIsLost(t *testing.T) {
	end, dir := startAwayEnd(t), t.TempDir()
	const exporter = "sending_queue: {storage: file_storage, queue_size: 100000}, retry_on_failure: {initial_interval: 100ms}"
	c, send := startKeeper(t, end, dir, exporter)
	t.Cleanup(c.Abandon)

	accepted := 0
	streamed := make(chan error, 1)
	go func() {
		const batch = 10
		var err error
		for ; err == nil; accepted += batch {
			err = send(accepted, batch)
			time.Sleep(10 * time.Millisecond)
		}
		streamed <- err
	}()
	decided := func() int {
		all, err := c.Metrics(t.Context())
		require.NoError(t, err)
		return int(all.Sum("processor_spike_sampling_traces_decided", `decision="sampled"`))
	}
	await(t, "some are decided", func() bool { return decided() > 500 })
	first := decided()
	// A later count says that the tick which took these decisions has come to its end.
	await(t, "more are decided", func() bool { return decided() > first })
	require.Empty(t, streamed, "traces still come")
	c.Abandon()
	require.Error(t, <-streamed)
	require.Zero(t, end.has(0, accepted), "nothing was sent before")

	again, _ := startKeeper(t, end, dir, exporter)
	untilTheEnd(t, again.Process)
	end.comeBack()
	await(t, "what was decided has arrived", func() bool { return end.has(0, first) == first })
	var lost float64
	await(t, "the lost are counted", func() bool {
		all, err := again.Metrics(t.Context())
		require.NoError(t, err)
		lost = all.Sum("processor_spike_sampling_traces_lost_at_restart", "")
		return lost > 0
	})
	assert.LessOrEqual(t, int(lost), accepted-first, "none of them was decided before the kill")
	t.Logf("%d traces accepted, %d decided before the kill, %d have arrived, %.0f undecided counted", accepted, first, end.has(0, accepted), lost)
}

// startKeeper starts a collector that keeps failed traces and sends them to end, with
// further options of its exporter, and a storage in dir if it is not empty. What it
// returns sends it n failed traces from the given number on.
func startKeeper(t *testing.T, end *awayEnd, dir, exporter string) (c *distribution.Collector, send func(from, n int) error) {
	t.Helper()
	otlp := freeAddr(t)
	configs := []string{
		"yaml:receivers::otlp::protocols::http::endpoint: " + otlp,
		"yaml:processors::spike_sampling: {decision_wait_after_root_received: 1s, policies: [{name: errors, type: status_code, status_code: {status_codes: [ERROR]}}]}",
		fmt.Sprintf("yaml:exporters::otlp_http: {endpoint: %q, compression: none, %s}", end.server.URL, exporter),
		"yaml:service::pipelines::traces: {receivers: [otlp], processors: [spike_sampling], exporters: [otlp_http]}",
	}
	if dir != "" {
		configs = append(configs,
			fmt.Sprintf("yaml:extensions::file_storage::directory: %q", dir),
			"yaml:processors::spike_sampling::storage: file_storage",
			"yaml:service::extensions: [file_storage]")
	}
	c, err := distribution.Start(t.Context(), "collector", filepath.Join(t.TempDir(), "collector.log"), nil, nil, collector(t), configs...)
	require.NoError(t, err)
	client := &http.Client{Timeout: 10 * time.Second}
	t.Cleanup(client.CloseIdleConnections)
	return c, func(from, n int) error {
		td := ptrace.NewTraces()
		for i := range n {
			add(td, "gateway", "gateway", from+i).Status().SetCode(ptrace.StatusCodeError)
		}
		body, err := (&ptrace.ProtoMarshaler{}).MarshalTraces(td)
		if err != nil {
			return err
		}
		response, err := client.Post("http://"+otlp+"/v1/traces", "application/x-protobuf", bytes.NewReader(body))
		if err != nil {
			return err
		}
		response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("the collector answers %s", response.Status)
		}
		return nil
	}
}

// awayEnd is a back end that refuses all, for a later time, until it comes back.
type awayEnd struct {
	server *httptest.Server

	mu      sync.Mutex
	back    bool
	refused int
	traces  map[pcommon.TraceID]bool
	err     error // of what could not be read
}

func startAwayEnd(t *testing.T) *awayEnd {
	t.Helper()
	e := &awayEnd{traces: map[pcommon.TraceID]bool{}}
	e.server = httptest.NewServer(e)
	t.Cleanup(func() {
		e.server.Close()
		assert.NoError(t, e.err)
	})
	return e
}

// ServeHTTP takes a batch of OTLP or refuses it.
func (e *awayEnd) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.back {
		e.refused++
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	body, err := io.ReadAll(r.Body)
	var td ptrace.Traces
	if err == nil {
		td, err = (&ptrace.ProtoUnmarshaler{}).UnmarshalTraces(body)
	}
	if err != nil {
		e.err = err
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	for _, rs := range td.ResourceSpans().All() {
		for _, ss := range rs.ScopeSpans().All() {
			for _, s := range ss.Spans().All() {
				e.traces[s.TraceID()] = true
			}
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func (e *awayEnd) comeBack() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.back = true
}

func (e *awayEnd) refusals() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.refused
}

// has counts those of n traces from the given number on that have arrived.
func (e *awayEnd) has(from, n int) (found int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range n {
		if e.traces[traceID(from+i)] {
			found++
		}
	}
	return found
}
