package spikesamplingprocessor

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/dbscan"
)

// steady adds perSecond spikes a second and steps, until the given time.
func steady(t *testing.T, c *clusters, from, until time.Duration, perSecond int) (open int) {
	t.Helper()
	rng := rand.New(rand.NewPCG(5, 6))
	for now := from; now < until; now += time.Second {
		for range perSecond {
			c.add(lockKey, features{at: at(now + time.Duration(rng.Int64N(int64(time.Second)))), ratio: 4 + rng.Float64()})
		}
		res := stepNow(c, at(now+time.Second))
		require.NoError(t, res.err)
		open = res.open
	}
	return open
}

// All that is known of a partition at the start is one long cluster. It is told
// from an incident by how long it lasts.
func TestABusyPartitionIsNotTakenForAClusterForEver(t *testing.T) {
	c := testClusters()
	assert.Positive(t, steady(t, c, 0, 20*time.Second, 8), "at first it is")
	assert.Zero(t, steady(t, c, 20*time.Second, 60*time.Second, 8))
	assert.Zero(t, steady(t, c, 60*time.Second, 300*time.Second, 8))
	// A rate of 8 within 1.6 s is 12.8: 34 are no accident.
	assert.InDelta(t, 34, c.minSamples(c.partitions[lockKey]), 3)
}

// The same rate after a quiet start is an incident, for as long as it lasts.
func TestALongIncidentStaysOne(t *testing.T) {
	c := testClusters()
	steady(t, c, 0, 60*time.Second, 0)
	c.add(lockKey, features{at: at(61 * time.Second), ratio: 4})
	assert.Equal(t, 1, steady(t, c, 62*time.Second, 10*time.Minute, 8))
	assert.Len(t, c.partitions[lockKey].open, 1)
	assert.Equal(t, uint64(1), c.seq, "under one id")
	assert.Equal(t, 8*538, c.partitions[lockKey].open[0].size)
}

// Bursts with lone spikes between them are found from the first second on.
func TestBurstsAreFoundFromTheStart(t *testing.T) {
	c := testClusters()
	for i := range 15 {
		now := time.Duration(i) * 4 * time.Second
		var burst []*point
		for k := range 6 {
			burst = append(burst, c.add(lockKey, features{at: at(now + time.Duration(k)*150*time.Millisecond), ratio: 10}))
		}
		if i%3 == 0 {
			c.add(lockKey, features{at: at(now + 2500*time.Millisecond), ratio: 10})
		}
		for s := range 4 {
			stepNow(c, at(now+time.Duration(s)*time.Second))
		}
		for _, pt := range burst {
			require.NotNil(t, pt.cluster, "burst %d", i)
		}
	}
}

func TestAnIncidentAmongTheFirstSlicesDoesNotLastInTheMean(t *testing.T) {
	var b background
	for i, n := range []int{1, 1, 400, 1, 1, 1} {
		b.put(n)
		switch {
		case i+1 < backgroundLeast:
			assert.Zero(t, b.perSlice(), "nothing is known yet")
		default:
			assert.InDelta(t, 1, b.perSlice(), 0)
		}
	}
	for range backgroundSlices - backgroundWarm {
		b.put(3)
	}
	assert.InDelta(t, (6*1+54*3)/60.0, b.perSlice(), 1e-9)
	for range backgroundSlices {
		b.put(0)
	}
	assert.True(t, b.idle())
}

// min_samples rises with the background at once and falls when it was lower for
// a window, so that one that wavers does not hide and show clusters by turns.
func TestMinSamplesFallsLate(t *testing.T) {
	c := testClusters()
	steady(t, c, 0, 2*time.Minute, 4)
	p := c.partitions[lockKey]
	high := c.minSamples(p)
	require.Greater(t, high, 15)
	lowered := time.Duration(0)
	for now := 2 * time.Minute; lowered == 0 && now < 20*time.Minute; now += time.Second {
		c.add(lockKey, features{at: at(now), ratio: 4}) // one a second instead of four
		stepNow(c, at(now+time.Second))
		bound := dbscan.PoissonMinSamples(p.background.perSlice() / 10 * 1.6)
		require.GreaterOrEqual(t, c.minSamples(p), bound, "never below the bound")
		if c.minSamples(p) < high {
			lowered = now
		}
	}
	assert.Greater(t, lowered, 3*time.Minute)
}
