package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/consumer/consumertest"
)

func TestRatioIsAboveOneForTheBetter(t *testing.T) {
	theirs := row{Subject: "theirs", Value: 2}
	less := row{Value: 1}
	less.compare(theirs, false)
	assert.Equal(t, row{Value: 1, RatioTo: "theirs", Ratio: 2}, less)
	more := row{Value: 1}
	more.compare(theirs, true)
	assert.Equal(t, row{Value: 1, RatioTo: "theirs", Ratio: 0.5}, more)
	none := row{}
	none.compare(theirs, false)
	assert.Zero(t, none, "nothing compares with zero")
}

func TestServerCommandsRowsAreTakenIn(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the command is only run as root")
	}
	var rep report
	const printed = `{"configs":[{"name":"n","cpu_ratio_median":1.25,"cpu_us_per_request_on":2.5}],"more":1}`
	require.NoError(t, measureServer(t.Context(), &rep, "echo '"+printed+"'"))
	require.Len(t, rep.Rows, 1)
	r := rep.Rows[0]
	assert.Equal(t, "server's CPU per request, n", r.Name)
	assert.InDelta(t, 2.5, r.Value, 0)
	assert.InDelta(t, 0.8, r.Ratio, 1e-9, "1.25 times worse")
	assert.JSONEq(t, printed, string(rep.ServerCost))
	assert.Empty(t, rep.LeftOut)

	for _, command := range []string{"exit 3", "echo hello", "echo {}", "true"} {
		rep := report{}
		require.Error(t, measureServer(t.Context(), &rep, command), command)
		assert.Empty(t, rep.Rows)
		assert.Len(t, rep.LeftOut, 1, command)
	}
}

func TestRowsAreReadFromTheBenchmarksLines(t *testing.T) {
	rep := report{Rows: []row{{Name: throughputScattered, Subject: "spike_sampling", Value: 500_000}}}
	const lines = "goos: linux\n" +
		"BenchmarkRecall/perMinute=30000/shards=4/minSamples=5-2 \t 10\t 23 ns/op\t 77.78 %spikes-found\t 76.1 %values-clustered\t 1.000 false-clusters\n" +
		"BenchmarkPlanted/perMinute=1000000-2 \t 1\t 23 ns/op\t 0 false-clusters\t 36.00 spikes-of-36\n" +
		"BenchmarkStep-2 \t 4000\t 400000 ns/op\t 123 B/op\t 1 allocs/op\nPASS"
	require.NoError(t, measureBenchmarks(t.Context(), &rep, "echo '"+lines+"'"))
	assert.Equal(t, []row{
		{
			Name: "planted spikes found", Subject: "perMinute=30000/shards=4/minSamples=5", Value: 77.78, Unit: "%",
			Note: "76.1 % of their values in a cluster, 1 false clusters",
		},
		{Name: "planted spikes found", Subject: "perMinute=1000000", Value: 36, Unit: "of 36", Note: "0 false clusters"},
		{Name: stepName, Subject: "spike_sampling", Value: 0.4, Unit: "ms", Note: "1 % of what the spans of a second take"},
	}, rep.Rows[1:])
	for _, command := range []string{"exit 3", "echo PASS", "echo BenchmarkRecall/x 1 2 ns/op", "echo BenchmarkRecall/x 1 a ns/op", "echo BenchmarkOther 1 2 ns/op"} {
		rep := report{}
		require.Error(t, measureBenchmarks(t.Context(), &rep, command), command)
		assert.Empty(t, rep.Rows)
		assert.Len(t, rep.LeftOut, 1, command)
	}
}

func TestWhatIsNotMeasuredIsListedWithItsReason(t *testing.T) {
	var rep report
	require.NoError(t, measureServer(t.Context(), &rep, ""))
	assert.Empty(t, rep.Rows)
	var out bytes.Buffer
	printTable(&out, &rep)
	assert.Contains(t, out.String(), "not measured: cost to the server per request: no command given with -server-cost")
}

func TestAFewTracesCostSomething(t *testing.T) {
	us, err := growthRun(t.Context(), 1, 0, &spare{})
	require.NoError(t, err, "exactly what had to be was kept")
	assert.Less(t, us, 1000.0, "microseconds a span")
	free, err := availableMemory()
	require.NoError(t, err)
	assert.Positive(t, free)
}

func TestLoadIsWholeAndAWrongSelectionIsNoticed(t *testing.T) {
	for _, scattered := range []bool{true, false} {
		load, want, err := makeLoad(scattered)
		require.NoError(t, err)
		require.Len(t, load, batches)
		spans := 0
		for _, td := range load {
			spans += td.SpanCount()
		}
		assert.Equal(t, batches*spansPerBatch, spans)
		assert.InDelta(t, len(want), 0.02*float64(spans)/spansPerTrace, 1)

		sink := new(consumertest.TracesSink)
		require.ErrorContains(t, checkKept(sink, want), "kept 0 traces")
		for _, td := range load {
			require.NoError(t, sink.ConsumeTraces(t.Context(), td))
		}
		require.ErrorContains(t, checkKept(sink, want), "neither slow nor failed")
	}
}
