package spikesamplingprocessor

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
)

// gauge returns the values of a gauge by service; none that were never observed.
func (h *harness) gauge(name string) map[string]float64 {
	h.tb.Helper()
	values := map[string]float64{}
	m, err := h.telemetry.GetMetric("otelcol_processor_spike_sampling_" + name)
	if err != nil {
		return values
	}
	for _, p := range m.Data.(metricdata.Gauge[float64]).DataPoints {
		v, _ := p.Attributes.Value(attribute.Key("service.name"))
		values[v.AsString()] = p.Value
	}
	return values
}

// serve sends 15 windows of 200 requests of two services: "app" has spans of its
// own, "llm" is measured by the receiver too. The last three windows' are slower
// by a factor, as the kernel saw them for llm.
func serve(h *harness, factor float64) {
	h.tb.Helper()
	id := uint64(1)
	for window := range 15 {
		for i := range uint64(200) {
			h.pass(50 * time.Millisecond)
			at := h.clock.Sub(epoch)
			d := 50*time.Millisecond + time.Duration(i)*100*time.Microsecond
			slow := d
			if window >= 12 {
				slow = time.Duration(factor * float64(d))
			}
			h.send(makeTraces(id, app("app", span{id: 1, kind: server, name: "GET", from: at - slow, to: at})))
			h.send(makeTraces(id+1,
				app("llm", span{id: 2, parent: 1, kind: server, name: "POST", from: at - d, to: at}),
				kernel("llm", request(3, 1, at-slow, at, nil))))
			id += 2
		}
	}
	h.pass(time.Second) // the last window is over
}

func TestAHeavierTailIsToldPerService(t *testing.T) {
	windows := func(c *Config) { c.Baseline.Window = time.Minute } // of 10 s
	h := newHarness(t, windows)
	serve(h, 1.1)
	for _, service := range []string{"app", "llm"} {
		assert.Greater(t, h.gauge("service_tail_z")[service], 3.3, service)
		assert.InDelta(t, 1.1, h.gauge("service_tail_effect")[service], 0.15, "%s: of 1 %% a good third", service)
		assert.InDelta(t, 0.052, h.gauge("service_jitter_ratio")[service], 0.01, "%s: three windows at 70 ms, three a tenth above", service)
	}

	steady := newHarness(t, windows)
	serve(steady, 1)
	for _, service := range []string{"app", "llm"} {
		assert.InDelta(t, 0, steady.gauge("service_tail_z")[service], 1, service)
		assert.InDelta(t, 0, steady.gauge("service_jitter_ratio")[service], 0.005, service)
	}

	h.pass(3 * time.Minute)
	for _, metric := range []string{"service_tail_z", "service_tail_effect", "service_jitter_ratio"} {
		assert.Empty(t, h.gauge(metric), "%s of services that are gone", metric)
	}
}

func TestRequestsOfServicesThatAreNotFollowedAreCounted(t *testing.T) {
	h := newHarness(t, nil)
	for i := range uint64(510) {
		h.send(makeTraces(i+1, app(fmt.Sprint("svc", i), span{id: 1, kind: server, name: "GET", to: time.Millisecond})))
	}
	h.pass(2 * time.Second)
	assert.EqualValues(t, 10, h.sum("service_requests_untracked", "")[""])
}

// Eight spikes at one moment are near each other whatever eps is, a lone one is
// near none: the distances say so, and leave eps as it is.
func TestDistancesOfSpikesShowWhichEpsWouldDo(t *testing.T) {
	for _, axes := range [][]AxisConfig{nil, {{Name: axisLatency, Scale: 10}, {Name: axisHops, Scale: 1}}} {
		h := newHarness(t, func(c *Config) {
			if axes != nil {
				c.Clustering.Axes, c.Clustering.PoissonBound = axes, false
			}
		})
		for i := range uint64(300) {
			h.pass(tickInterval)
			at := h.clock.Sub(epoch)
			h.send(makeTraces(1000+i, kernel("llm", request(2, 1, at-100*time.Millisecond, at, map[string]float64{"stage.lock": 0}))))
		}
		spiked := func(id uint64, lock float64) {
			at := h.clock.Sub(epoch)
			h.send(makeTraces(id, kernel("llm", request(2, 1, at-20*time.Second, at, map[string]float64{"stage.lock": lock}))))
		}
		for i := range uint64(8) {
			spiked(i+1, 0.5)
		}
		h.pass(10 * time.Second)
		spiked(9, 15)
		_, err := h.telemetry.GetMetric("otelcol_processor_spike_sampling_neighbour_distance")
		require.Error(t, err, "once in a window")
		h.pass(25 * time.Second)
		m, err := h.telemetry.GetMetric("otelcol_processor_spike_sampling_neighbour_distance")
		require.NoError(t, err)
		p := m.Data.(metricdata.Histogram[float64]).DataPoints[0]
		assert.EqualValues(t, 9, p.Count)
		assert.EqualValues(t, 8, p.BucketCounts[0], "at most 0.05")
		largest, _ := p.Max.Value()
		assert.Greater(t, largest, 2.0)
		assert.LessOrEqual(t, largest, 100.0)
	}
}
