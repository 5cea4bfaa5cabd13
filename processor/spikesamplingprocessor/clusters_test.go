package spikesamplingprocessor

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var lockKey = partitionKey{"svc", "chat", "lock"}

func at(d time.Duration) int64 { return epoch.Add(d).UnixNano() }

func testClusters() *clusters { return newClusters(defaultConfig().Clustering, at(0)) }

// requireForgotten lets an hour pass, after which nothing must be left.
func requireForgotten(t *testing.T, c *clusters) {
	t.Helper()
	for i := range closeAfter {
		require.NoError(t, c.step(at(time.Hour+time.Duration(i)*time.Second)).err)
	}
	require.Empty(t, c.partitions)
	require.Empty(t, c.order)
	require.Empty(t, c.incidents)
	require.Zero(t, c.points)
}

func TestSpikesCloseInTimeAndAlikeInSizeAreACluster(t *testing.T) {
	other := partitionKey{"svc", "chat", "page_fault"}
	tests := []struct {
		name string
		add  func(c *clusters) []*point
		want bool
	}{
		{"close and alike", func(c *clusters) (pts []*point) {
			for i := range 5 {
				pts = append(pts, c.add(lockKey, features{at: at(time.Duration(i) * 100 * time.Millisecond), ratio: 10 + float64(i)}))
			}
			return pts
		}, true},
		{"too few", func(c *clusters) (pts []*point) {
			for i := range 4 {
				pts = append(pts, c.add(lockKey, features{at: at(time.Duration(i) * 100 * time.Millisecond), ratio: 10}))
			}
			return pts
		}, false},
		{"too far apart in time", func(c *clusters) (pts []*point) {
			for i := range 5 {
				pts = append(pts, c.add(lockKey, features{at: at(time.Duration(i) * time.Second), ratio: 10}))
			}
			return pts
		}, false},
		{"too unlike in size", func(c *clusters) (pts []*point) {
			ratio := 2.0
			for range 5 {
				pts = append(pts, c.add(lockKey, features{at: at(0), ratio: ratio}))
				ratio *= 4
			}
			return pts
		}, false},
		{"of different stages", func(c *clusters) (pts []*point) {
			for i := range 8 {
				pts = append(pts, c.add([]partitionKey{lockKey, other}[i%2], features{at: at(0), ratio: 10}))
			}
			return pts
		}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := testClusters()
			pts := tt.add(c)
			res := c.step(at(5 * time.Second))
			require.NoError(t, res.err)
			assert.Equal(t, tt.want, res.open > 0)
			for _, pt := range pts {
				assert.Equal(t, tt.want, pt.cluster != nil)
			}
		})
	}
}

func TestAClusterKeepsItsIDWhileItLasts(t *testing.T) {
	c := testClusters()
	var ids []string
	for i := range 300 { // 90 s, longer than the window
		now := 70*time.Second + time.Duration(i)*300*time.Millisecond
		pt := c.add(lockKey, features{at: at(now), ratio: 10})
		c.step(at(now))
		if i > 10 {
			require.NotNil(t, pt.cluster)
			ids = append(ids, pt.cluster.id)
		}
	}
	for _, id := range ids {
		assert.Equal(t, ids[0], id)
	}
	requireForgotten(t, c)
}

func TestAReleasedIDNeverChanges(t *testing.T) {
	c := testClusters()
	var early, late []*point
	for i := range 6 {
		early = append(early, c.add(lockKey, features{at: at(time.Duration(i) * 100 * time.Millisecond), ratio: 10}))
		late = append(late, c.add(lockKey, features{at: at(2*time.Second + time.Duration(i)*100*time.Millisecond), ratio: 10}))
	}
	c.step(at(3 * time.Second))
	first, second := early[0].cluster, late[0].cluster
	require.NotNil(t, first)
	require.NotNil(t, second)
	require.NotEqual(t, first.id, second.id)
	late[0].final = true // its trace was sent

	for i := range 20 { // spikes between the two join them
		c.add(lockKey, features{at: at(500*time.Millisecond + time.Duration(i)*80*time.Millisecond), ratio: 10})
	}
	res := c.step(at(3 * time.Second))
	assert.Equal(t, 1, res.open)
	assert.Equal(t, 1, res.merged, "reported")
	assert.Equal(t, second, late[0].cluster, "what was sent stays")
	assert.Equal(t, first, late[1].cluster, "what was not goes with the older")
	res = c.step(at(3500 * time.Millisecond))
	assert.LessOrEqual(t, res.merged, 1)
}

// A steady background of lone spikes makes accidents of five within reach
// likely; they are no cluster, and a real burst still is.
func TestTheBackgroundRaisesMinSamples(t *testing.T) {
	cfg := defaultConfig().Clustering
	c := newClusters(cfg, at(0))
	rng := rand.New(rand.NewPCG(3, 4))
	var now time.Duration
	step := func(until time.Duration) {
		for ; now < until; now += time.Second {
			for range 1 + rng.IntN(3) { // two a second
				c.add(lockKey, features{at: at(now + time.Duration(rng.IntN(1000))*time.Millisecond), ratio: 4 + rng.Float64()})
			}
			c.step(at(now + time.Second))
		}
	}
	step(70 * time.Second)
	p := c.partitions[lockKey]
	assert.Greater(t, c.minSamples(p), cfg.MinSamples)
	before := c.seq
	step(300 * time.Second)
	assert.Equal(t, before, c.seq, "no new cluster in four minutes of background")
	var burst []*point
	for i := range 30 {
		burst = append(burst, c.add(lockKey, features{at: at(now + time.Duration(i)*20*time.Millisecond), ratio: 4.5}))
	}
	step(now + 2*time.Second)
	for _, pt := range burst {
		assert.NotNil(t, pt.cluster)
	}
}

func TestBeyondTheBoundSpikesAreLoneAndTheStepSaysSo(t *testing.T) {
	c := testClusters()
	for range maxPartition {
		c.add(lockKey, features{at: at(0), ratio: 10})
	}
	over := c.add(lockKey, features{at: at(0), ratio: 10})
	res := c.step(at(time.Second))
	assert.Equal(t, 1, res.approximate)
	assert.Nil(t, over.cluster)
	assert.Zero(t, c.step(at(2*time.Second)).approximate, "said once")
}

func TestASpikeThatTheWindowHasNotReachedWaitsForIt(t *testing.T) {
	c := testClusters()
	var pts []*point
	for range 5 {
		pts = append(pts, c.add(lockKey, features{at: at(10 * time.Second), ratio: 10}))
	}
	require.NoError(t, c.step(at(time.Second)).err)
	assert.Nil(t, pts[0].cluster)
	assert.Equal(t, 5, c.points)
	require.NoError(t, c.step(at(11*time.Second)).err)
	for _, pt := range pts {
		assert.NotNil(t, pt.cluster)
	}
	requireForgotten(t, c)
}

func TestASpikeOlderThanTheWindowIsLone(t *testing.T) {
	c := testClusters()
	c.add(lockKey, features{at: at(0), ratio: 10})
	c.step(at(10 * time.Minute))
	pt := c.add(lockKey, features{at: at(0), ratio: 10})
	res := c.step(at(11 * time.Minute))
	require.NoError(t, res.err)
	assert.Nil(t, pt.cluster)
	assert.Zero(t, res.approximate)
}
