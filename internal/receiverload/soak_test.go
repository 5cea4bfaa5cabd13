//go:build linux && amd64

package main

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestALineTellsGrowthFromNoise(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	noise := func(size float64) float64 { return size * (2*random.Float64() - 1) }
	for _, c := range []struct {
		name  string
		value func(hour float64) float64
		flat  bool
	}{
		{"constant", func(float64) float64 { return 40 }, true},
		{"noise", func(float64) float64 { return 40 + noise(10) }, true},
		{"falling", func(h float64) float64 { return 40 - 20*h }, true},
		{"so little that it is nothing", func(h float64) float64 { return 40 + 1.5*h + noise(0.1) }, true},
		{"a leak", func(h float64) float64 { return 40 + 30*h }, false},
		{"a leak under noise", func(h float64) float64 { return 40 + 30*h + noise(4) }, false},
		{"a step that stays", func(h float64) float64 {
			if h > 0.17 {
				return 50
			}
			return 40
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var hours, values []float64
			for i := range 90 { // a third of an hour
				h := float64(i) / 270
				hours, values = append(hours, h), append(values, c.value(h))
			}
			got := fit("x", hours, values, 2)
			assert.Equal(t, c.flat, got.Flat, "%+v", got)
		})
	}
}

func TestALineIsTheLeastSquares(t *testing.T) {
	got := fit("x", []float64{0, 1, 2, 3}, []float64{1, 2, 4, 5}, 0)
	assert.InDelta(t, 1.4, got.PerHour, 1e-12)
	assert.InDelta(t, 3, got.Mean, 1e-12)
	assert.InDelta(t, 4.2, got.Grown, 1e-12)
	assert.InDelta(t, 0.1414213562, got.Error, 1e-9) // residuals 0.1, -0.3, 0.3, -0.1 over n-2, and 5 of spread
}

func TestEachValueThatIsSampledHasATrend(t *testing.T) {
	var samples []timed
	for i := range 20 {
		s := sample{RSS: 40, Heap: 2, Maps: 12, Goroutines: 9 + i, Files: 50, Entries: map[string]int{"lanes": 10 * i, "conns": 64}}
		samples = append(samples, timed{time.Duration(i) * time.Second, s})
	}
	flat := map[string]bool{}
	for _, tr := range trends(samples) {
		flat[tr.Name] = tr.Flat
	}
	assert.Equal(t, map[string]bool{
		"rss_mib": true, "live_heap_mib": true, "bpf_maps_mib": true, "open_files": true, "map_entries/conns": true,
		"goroutines": false, "map_entries/lanes": false,
	}, flat)
}

func TestALossOrAMissingRequestIsAnError(t *testing.T) {
	r := result{Name: "x", Asked: 10, Seen: 10, Lost: map[string]uint64{}}
	require.NoError(t, r.check())
	r.Seen = 9
	require.ErrorContains(t, r.check(), "10 requests were answered and 9 recorded")
	r.Seen, r.Lost = 10, map[string]uint64{"ring_full_progress": 3}
	require.ErrorContains(t, r.check(), "3 records lost: ring_full_progress")
}

func TestThisProcessCanBeSampled(t *testing.T) {
	s, err := takeSample()
	require.NoError(t, err)
	assert.Positive(t, s.RSS)
	assert.GreaterOrEqual(t, s.PeakRSS, s.RSS-1)
	assert.Positive(t, s.Heap)
	assert.Positive(t, s.Goroutines)
	assert.Positive(t, s.Files)
}
