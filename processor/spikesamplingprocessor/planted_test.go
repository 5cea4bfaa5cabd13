package spikesamplingprocessor

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// value is one value of one series; spike tells which planted spike it is of,
// from 1.
type value struct {
	at      time.Duration
	seconds float64
	series  int
	spike   int
}

// plantedMinute is a minute of traffic: a log-normal body with a median of 8 ms
// and a P99 of 32 ms on each series, and 12 spikes of 6 to 50 values, 80 to
// 400 ms long and alike to a few percent, that end within one to two seconds.
func plantedMinute(rng *rand.Rand, perMinute, nSeries, minute int) []value {
	var vs []value
	from := time.Duration(minute) * time.Minute
	for range perMinute {
		vs = append(vs, value{
			at:      from + time.Duration(rng.Int64N(int64(time.Minute))),
			seconds: 0.008 * math.Exp(0.6*rng.NormFloat64()),
			series:  rng.IntN(nSeries),
		})
	}
	for i := range 12 {
		at := from + 2*time.Second + time.Duration(rng.Int64N(int64(55*time.Second)))
		series, ms := rng.IntN(nSeries), 80+320*rng.Float64()
		width := 0.05 + 0.25*rng.Float64()
		for range 6 + rng.IntN(45) {
			vs = append(vs, value{
				at:      at + time.Duration(width*rng.NormFloat64()*float64(time.Second)),
				seconds: ms / 1e3 * (1 + 0.05*rng.NormFloat64()),
				series:  series, spike: 12*minute + i + 1,
			})
		}
	}
	slices.SortFunc(vs, func(a, b value) int { return int(a.at - b.at) })
	return vs
}

// planted runs minutes of traffic through the processor's baseline, clustering
// and settling and tells how many of the last minute's spikes were found (half
// of their values or more in one cluster), and how many clusters are none (half
// of their values or more of the body) from the second minute on. The minutes before hold as many spikes:
// the baseline is learned from what it must not learn.
func planted(t *testing.T, perMinute, nSeries, minutes int, seed uint64, bound bool) (found, falsely int) {
	t.Helper()
	h := newHarness(t, func(c *Config) {
		c.MaxBufferMiB = 1024
		c.Clustering.PoissonBound = bound
	})
	p := h.p
	rng := rand.New(rand.NewPCG(seed, 1))
	stages := stage.All()
	kinds := make([]*seriesKind, nSeries)
	operations := make([]string, nSeries)
	for i := range kinds {
		kinds[i], operations[i] = exclusive[stages[i%8]], fmt.Sprintf("op%d", i/8)
	}

	type seen struct {
		value
		tr *trace
	}
	var waiting []seen
	inCluster := map[*cluster]map[int]int{} // values by planted spike
	sizes := map[int]int{}
	last := 12 * (minutes - 1)
	settle := func(before time.Duration) {
		for len(waiting) > 0 && waiting[0].at < before {
			s := waiting[0]
			waiting = waiting[1:]
			p.settle(s.tr)
			if cl := s.tr.spikes[0].point.cluster; cl != nil {
				if inCluster[cl] == nil {
					inCluster[cl] = map[int]int{}
				}
				inCluster[cl][s.spike]++
			}
		}
	}
	next := time.Second
	for minute := range minutes {
		for _, v := range plantedMinute(rng, perMinute, nSeries, minute) {
			for ; v.at >= next; next += time.Second {
				p.step(epoch.Add(next).UnixNano())
				settle(next - p.cfg.Clustering.ClusterWait)
			}
			if v.spike > 0 {
				sizes[v.spike]++
			}
			tr := &trace{}
			now := epoch.Add(max(v.at, next-time.Second)).UnixNano()
			group := p.baseline.Group("svc", operations[v.series])
			p.judge(series(group, kinds[v.series]), tr, spike{
				kind: kinds[v.series], service: "svc", operation: operations[v.series], seconds: v.seconds, learn: true,
			}, now, now)
			if len(tr.spikes) > 0 {
				waiting = append(waiting, seen{v, tr})
			}
		}
	}
	for range 5 {
		p.step(epoch.Add(next).UnixNano())
		next += time.Second
	}
	settle(time.Hour)

	got := map[int]bool{}
	for cl, spikes := range inCluster {
		all := 0
		for id, n := range spikes {
			all += n
			if id > 0 && 2*n >= sizes[id] {
				got[id] = true
			}
		}
		if 2*spikes[0] >= all && cl.start >= epoch.Add(time.Minute).UnixNano() {
			falsely++
		}
	}
	for id := range sizes {
		if id > last && got[id] {
			found++
		}
	}
	return found, falsely
}

// TestPlantedSpikesAreFound: at each rate at least 34 of 36 spikes are found,
// with at most one cluster that is none.
func TestPlantedSpikesAreFound(t *testing.T) {
	for _, tt := range []struct {
		perMinute, minutes int
		atLeast            int
	}{
		{30_000, 4, 34},
		{300_000, 3, 34},
		{1_000_000, 3, 34},
		{600, 10, 0}, // 10 a second: reported
	} {
		t.Run(fmt.Sprint(tt.perMinute, " a minute"), func(t *testing.T) {
			found, falsely := 0, 0
			for seed := range uint64(3) {
				f, no := planted(t, tt.perMinute, 24, tt.minutes, seed, true)
				found, falsely = found+f, falsely+no
			}
			t.Logf("%d of 36 spikes found, %d clusters without a spike", found, falsely)
			assert.GreaterOrEqual(t, found, tt.atLeast)
			assert.LessOrEqual(t, falsely, 1)
		})
	}
}

// One value in 4,000 of the body is above twice its P99. On one series that is a
// background in which five come together by accident all the time.
func TestOnlyThePoissonBoundKeepsABusyBackgroundFromBeingClusters(t *testing.T) {
	_, without := planted(t, 200_000, 1, 10, 1, false)
	assert.GreaterOrEqual(t, without, 5)
	found, with := planted(t, 200_000, 1, 10, 1, true)
	assert.LessOrEqual(t, with, 1)
	assert.Positive(t, found, "large spikes are still found")
}
