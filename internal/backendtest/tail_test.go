//go:build backends

package backendtest

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/baseline"
)

// The query of examples/victoriametrics that compares two tails, as it stands,
// gives what the test's formulas give for the counts that are there.
func TestTheTailsOfTwoServicesCompareAsTheFormulasSay(t *testing.T) {
	query, err := os.ReadFile("../../examples/victoriametrics/tail-comparison.metricsql")
	require.NoError(t, err)
	victoria := startVictoriaMetrics(t)
	a, b := baseline.Share{K: 90, N: 2000}, baseline.Share{K: 30, N: 1500}
	now := time.Now()
	var text strings.Builder
	for service, s := range map[string]baseline.Share{"chat": a, "chat-stable": b} {
		for _, at := range []struct {
			time  time.Time
			share float64 // of the counts, that are there by then
		}{{now.Add(-25 * time.Minute), 0}, {now.Add(-10 * time.Minute), 0.5}, {now.Add(-10 * time.Second), 1}} {
			fmt.Fprintf(&text, "ebpfllm.request.duration_count{service.name=%q} %g %d\n", service, at.share*s.N, at.time.UnixMilli())
			for le, n := range map[string]float64{"1": 0.8 * s.N, "2.5": s.N - s.K, "+Inf": s.N} {
				fmt.Fprintf(&text, "ebpfllm.request.duration_bucket{service.name=%q,le=%q} %g %d\n", service, le, at.share*n, at.time.UnixMilli())
			}
		}
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, victoria.base+"/api/v1/import/prometheus", strings.NewReader(text.String()))
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	response.Body.Close()
	require.Equal(t, http.StatusNoContent, response.StatusCode)

	var found map[string]float64
	await(t, "the counts can be asked for", func() bool {
		var answer struct {
			Status, Error string
			Data          struct {
				Result []struct {
					Metric struct{ Is string }
					Value  [2]any
				}
			}
		}
		getJSON(t, victoria.base+"/api/v1/query?query="+url.QueryEscape(string(query)), &answer)
		require.Equal(t, "success", answer.Status, answer.Error)
		found = map[string]float64{}
		for _, r := range answer.Data.Result {
			v, err := strconv.ParseFloat(r.Value[1].(string), 64)
			require.NoError(t, err)
			found[r.Metric.Is] = v
		}
		return len(found) == 4
	})
	want := baseline.Compare(a, b)
	require.Greater(t, want.Z, 3.3)
	assert.InDelta(t, want.Z, found["z"], 1e-9)
	assert.InDelta(t, want.Effect, found["effect"], 1e-9)
	assert.InDelta(t, a.K/a.N, found["share a"], 1e-9)
	assert.InDelta(t, b.K/b.N, found["share b"], 1e-9)
}
