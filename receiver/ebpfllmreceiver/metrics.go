//go:build linux && amd64

package ebpfllmreceiver

import (
	"cmp"
	"slices"
	"strconv"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/pmetric"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/httphead"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// Bounds of what the metrics may hold.
const (
	maxMetricProcesses = 4096
	maxSeries          = 2048 // of one process; what goes beyond is put into one series per metric
)

// metricDef is one of the pipeline metrics, all histograms of seconds.
type metricDef struct {
	name, description string
	bounds            []float64
}

type metricID uint8

const (
	requestDuration metricID = iota
	stageDuration
	chunkGap
	genAIRequestDuration
	genAIFirstToken
)

// The bounds of the gen_ai metrics are those that their semantic conventions
// advise.
var metricDefs = [...]metricDef{
	requestDuration: {
		"ebpfllm.request.duration", "Duration of requests, from the first byte's arrival in the kernel to the last byte handed to the device.",
		[]float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80},
	},
	stageDuration: {
		"ebpfllm.request.stage.duration", "Time of a request that was spent in a stage.",
		[]float64{0, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 40},
	},
	chunkGap: {
		"ebpfllm.response.chunk.gap", "Time between two writes of a response.",
		[]float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10},
	},
	genAIRequestDuration: {
		"gen_ai.server.request.duration", "Generative AI server request duration such as time-to-last byte or last output token.",
		[]float64{0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92},
	},
	genAIFirstToken: {
		"gen_ai.server.time_to_first_token", "Time to generate first token for successful responses.",
		[]float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10},
	},
}

// seriesKey names a series of one process.
type seriesKey struct {
	metric    metricID
	stage     stage.Stage // of stageDuration
	method    string      // "" is left out
	operation string      // "" is left out
	status    int         // 0 is left out
	errorType string      // "" is left out
	overflow  bool        // the series of what has no series of its own
}

func compareKeys(a, b seriesKey) int {
	return cmp.Or(cmp.Compare(a.metric, b.metric), cmp.Compare(a.stage, b.stage),
		cmp.Compare(a.method, b.method), cmp.Compare(a.operation, b.operation),
		cmp.Compare(a.status, b.status), cmp.Compare(a.errorType, b.errorType))
}

func (k seriesKey) fill(a pcommon.Map) {
	put := func(name, value string) {
		if value != "" {
			a.PutStr(name, value)
		}
	}
	if k.overflow {
		a.PutBool("otel.metric.overflow", true)
		return
	}
	if k.metric == stageDuration {
		a.PutStr("ebpfllm.stage", k.stage.String())
	}
	put("http.request.method", k.method)
	put("gen_ai.operation.name", k.operation)
	if k.status != 0 {
		a.PutInt("http.response.status_code", int64(k.status))
	}
	put("error.type", k.errorType)
}

// exemplarIDs name the span that a value comes from; zero if no span of it is
// exported.
type exemplarIDs struct {
	trace pcommon.TraceID
	span  pcommon.SpanID
}

type exemplar struct {
	exemplarIDs
	value float64
	time  uint64
}

// histogram is one series. It keeps the latest exemplar of each bucket.
type histogram struct {
	counts        []uint64
	exemplars     []exemplar // of the interval; trace is zero where there is none
	count         uint64
	sum, min, max float64
	start         uint64
}

// record adds a value that was observed at the given wall time.
func (h *histogram) record(bounds []float64, value float64, now uint64, ids exemplarIDs) {
	if h.count == 0 {
		h.min, h.max = value, value
	}
	h.min, h.max = min(h.min, value), max(h.max, value)
	h.count++
	h.sum += value
	i, _ := slices.BinarySearch(bounds, value) // bounds are inclusive upper ones
	h.counts[i]++
	if !ids.trace.IsEmpty() {
		h.exemplars[i] = exemplar{ids, value, now}
	}
}

// metricStore holds the histograms of every process. It is for one goroutine.
type metricStore struct {
	processes map[*process]*processSeries
	refused   uint64 // requests not counted because of maxMetricProcesses
	now       func() uint64
}

// newMetricStore returns an empty store; now gives wall time in nanoseconds
// since 1970.
func newMetricStore(now func() uint64) *metricStore {
	return &metricStore{processes: map[*process]*processSeries{}, now: now}
}

// processSeries are the series of one process. Most values of a request are those
// of its stages, so these are found all at once.
type processSeries struct {
	series map[seriesKey]*histogram
	stages map[stagesKey]*[stage.Count]*histogram
}

// stagesKey is what tells the series of one stage apart.
type stagesKey struct{ method, operation string }

// find returns the series of a key, or the one that is there for all that have no
// room. A new one begins at the given time.
func (s *processSeries) find(k seriesKey, begin uint64) *histogram {
	h := s.series[k]
	if h != nil {
		return h
	}
	if len(s.series) >= maxSeries {
		k = seriesKey{metric: k.metric, overflow: true}
		h = s.series[k]
	}
	if h == nil {
		n := len(metricDefs[k.metric].bounds) + 1
		h = &histogram{counts: make([]uint64, n), exemplars: make([]exemplar, n), start: begin}
		s.series[k] = h
	}
	return h
}

// ofStages returns the series of the stages that were found before.
func (s *processSeries) ofStages(k stagesKey) *[stage.Count]*histogram {
	found := s.stages[k]
	if found == nil {
		found = new([stage.Count]*histogram)
		s.stages[k] = found
	}
	return found
}

// record counts a finished request, given the wall times of its begin and end.
func (m *metricStore) record(p *process, req *assemble.Request, begin, end uint64, ids exemplarIDs) {
	series := m.processes[p]
	if series == nil {
		if len(m.processes) >= maxMetricProcesses {
			m.refused++
			return
		}
		series = &processSeries{series: map[seriesKey]*histogram{}, stages: map[stagesKey]*[stage.Count]*histogram{}}
		m.processes[p] = series
	}
	add := func(k seriesKey, value float64) {
		series.find(k, begin).record(metricDefs[k.metric].bounds, value, end, ids)
	}

	duration := seconds(int64(max(req.End, req.Start) - req.Start))
	operation := httphead.GenAIOperation(req.Head.Path)
	key := seriesKey{method: req.Head.Method, operation: operation}

	k := key
	k.metric, k.status = requestDuration, req.Status
	add(k, duration)

	missing := missingStages(req)
	stages := series.ofStages(stagesKey{key.method, operation})
	for _, s := range allStages {
		if missing[s] {
			continue
		}
		if stages[s] == nil {
			k := key
			k.metric, k.stage = stageDuration, s
			stages[s] = series.find(k, begin)
		}
		stages[s].record(metricDefs[stageDuration].bounds, seconds(req.Exclusive[s]), end, ids)
	}
	k = key
	k.metric = chunkGap
	for _, gap := range req.GapValues {
		add(k, seconds(gap))
	}
	if operation == "" {
		return
	}
	k = seriesKey{metric: genAIRequestDuration, operation: operation}
	if req.Status >= 400 {
		k.errorType = strconv.Itoa(req.Status)
	}
	add(k, duration)
	first, ok := timeToFirstChunk(req)
	if ok && req.Streaming && req.Status/100 == 2 {
		add(seriesKey{metric: genAIFirstToken, operation: operation}, first)
	}
}

// collect returns all series as they stand, and forgets those of processes that
// have ended.
func (m *metricStore) collect() pmetric.Metrics {
	out := pmetric.NewMetrics()
	now := pcommon.Timestamp(m.now())
	processes := make([]*process, 0, len(m.processes))
	for p := range m.processes {
		processes = append(processes, p)
	}
	slices.SortFunc(processes, func(a, b *process) int {
		return cmp.Or(cmp.Compare(a.PID, b.PID), cmp.Compare(a.StartTime, b.StartTime))
	})
	for _, p := range processes {
		series := m.processes[p].series
		keys := make([]seriesKey, 0, len(series))
		for k := range series {
			keys = append(keys, k)
		}
		slices.SortFunc(keys, compareKeys)

		rm := out.ResourceMetrics().AppendEmpty()
		p.fill(rm.Resource())
		sm := rm.ScopeMetrics().AppendEmpty()
		sm.Scope().SetName(scopeName)
		var points pmetric.HistogramDataPointSlice
		for i, k := range keys {
			if i == 0 || k.metric != keys[i-1].metric {
				points = newMetric(sm.Metrics().AppendEmpty(), k.metric)
			}
			point := points.AppendEmpty()
			k.fill(point.Attributes())
			series[k].fill(point, k.metric, now)
		}
		if p.gone {
			delete(m.processes, p)
		}
	}
	return out
}

func newMetric(m pmetric.Metric, id metricID) pmetric.HistogramDataPointSlice {
	def := metricDefs[id]
	m.SetName(def.name)
	m.SetDescription(def.description)
	m.SetUnit("s")
	h := m.SetEmptyHistogram()
	h.SetAggregationTemporality(pmetric.AggregationTemporalityCumulative)
	return h.DataPoints()
}

// fill writes the series into a point and starts a new interval of exemplars.
func (h *histogram) fill(point pmetric.HistogramDataPoint, id metricID, now pcommon.Timestamp) {
	point.SetStartTimestamp(pcommon.Timestamp(h.start))
	point.SetTimestamp(max(now, pcommon.Timestamp(h.start)))
	point.SetCount(h.count)
	point.SetSum(h.sum)
	point.SetMin(h.min)
	point.SetMax(h.max)
	point.ExplicitBounds().FromRaw(metricDefs[id].bounds)
	point.BucketCounts().FromRaw(h.counts)
	for i := range h.exemplars {
		e := &h.exemplars[i]
		if e.trace.IsEmpty() {
			continue
		}
		x := point.Exemplars().AppendEmpty()
		x.SetTraceID(e.trace)
		x.SetSpanID(e.span)
		x.SetDoubleValue(e.value)
		x.SetTimestamp(pcommon.Timestamp(e.time))
		*e = exemplar{}
	}
}
