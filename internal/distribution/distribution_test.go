package distribution

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMetricsAreReadWithAndWithoutLabels(t *testing.T) {
	all, err := parse(strings.NewReader(`# HELP otelcol_processor_spike_sampling_traces_decided_total Traces
otelcol_processor_spike_sampling_traces_decided_total{decision="sampled",policy="spikes"} 3
otelcol_processor_spike_sampling_traces_decided_total{decision="not_sampled",policy="a b"} 40
otelcol_processor_spike_sampling_traces_decided_early_total{reason="buffer_full"} 500
otelcol_process_cpu_seconds_total 1.5e+01
go_gc_count 7
`))
	require.NoError(t, err)
	require.Len(t, all, 4)
	decided := "processor_spike_sampling_traces_decided"
	assert.InDelta(t, 43, all.Sum(decided, ""), 0)
	assert.InDelta(t, 3, all.Sum(decided, `decision="sampled"`), 0)
	assert.InDelta(t, 15, all.Sum("process_cpu_seconds", ""), 0)
	assert.Zero(t, all.Sum("processor_spike_sampling_spans_late", ""))
	assert.Equal(t, `processor_spike_sampling_traces_decided_early{reason="buffer_full"} 500`, all[2].String())

	_, err = parse(strings.NewReader("otelcol_x many\n"))
	assert.ErrorContains(t, err, "otelcol_x many")
}

func TestAProgramThatEndsBeforeItIsReadyIsShownWithItsOutput(t *testing.T) {
	_, err := Start(t.Context(), "the collector", filepath.Join(t.TempDir(), "log"), nil, nil, "/bin/sh", "x")
	assert.ErrorContains(t, err, "the collector ended before it was ready")
}

func TestAProgramThatNeverIsReadyIsEnded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hangs")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\nexec sleep 300\n"), 0o700))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := Start(ctx, "the collector", filepath.Join(t.TempDir(), "log"), nil, nil, path)
	assert.ErrorContains(t, err, "the collector was not ready in time")
}

func TestWhereNoCollectorIsTheRemedyIsNamed(t *testing.T) {
	require.ErrorContains(t, Check(t.TempDir()), "run `make build`")
	require.NoError(t, Check("/bin/sh"))
}
