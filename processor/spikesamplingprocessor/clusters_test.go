package spikesamplingprocessor

import (
	"encoding/csv"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/dbscan"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

var lockKey = partitionKey{"svc", "chat", "lock"}

func at(d time.Duration) int64 { return epoch.Add(d).UnixNano() }

func testClusters() *clusters { return newClusters(defaultConfig().Clustering, at(0)) }

// requireForgotten lets an hour pass, after which nothing must be left.
func requireForgotten(t *testing.T, c *clusters) {
	t.Helper()
	for i := range closeAfter {
		require.NoError(t, stepNow(c, at(time.Hour+time.Duration(i)*time.Second)).err)
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
			res := stepNow(c, at(5*time.Second))
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
		stepNow(c, at(now))
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
	stepNow(c, at(3*time.Second))
	first, second := early[0].cluster, late[0].cluster
	require.NotNil(t, first)
	require.NotNil(t, second)
	require.NotEqual(t, first.id, second.id)
	c.settle(late[0]) // its trace was sent

	for i := range 20 { // spikes between the two join them
		c.add(lockKey, features{at: at(500*time.Millisecond + time.Duration(i)*80*time.Millisecond), ratio: 10})
	}
	res := stepNow(c, at(3*time.Second))
	assert.Equal(t, 1, res.open)
	assert.Equal(t, 1, res.merged, "reported")
	assert.Equal(t, second, late[0].cluster, "what was sent stays")
	assert.Equal(t, first, late[1].cluster, "what was not goes with the older")
	res = stepNow(c, at(3500*time.Millisecond))
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
			stepNow(c, at(now+time.Second))
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
	res := stepNow(c, at(time.Second))
	assert.Equal(t, 1, res.approximate)
	assert.Nil(t, over.cluster)
	assert.Zero(t, stepNow(c, at(2*time.Second)).approximate, "said once")
}

// Two places a hair too far apart, each with half of the spikes and neither with
// enough: each spike would have to be compared with all.
func TestAStepThatWouldTakeTooLongIsApproximateAndCounted(t *testing.T) {
	h := newHarness(t, func(c *Config) {
		c.Clustering.Axes = []AxisConfig{{Name: axisTime, Scale: 1}, {Name: axisLatency, Scale: 1}}
		c.Clustering.Eps, c.Clustering.PoissonBound = 1, false
		c.Clustering.MinSamples = 30_001
	})
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range 60_000 {
		h.p.clusters.add(lockKey, features{at: at(time.Duration(rng.IntN(1000))), seconds: 1.0001e-3 * float64(i%2)})
	}
	h.pass(1500 * time.Millisecond)
	assert.Equal(t, int64(1), h.sum("approximate_steps", "")[""])
	assert.Len(t, h.p.clusters.partitions[lockKey].labels, 60_000, "all have a label")
}

func TestASpikeThatTheWindowHasNotReachedWaitsForIt(t *testing.T) {
	c := testClusters()
	var pts []*point
	for range 5 {
		pts = append(pts, c.add(lockKey, features{at: at(10 * time.Second), ratio: 10}))
	}
	require.NoError(t, stepNow(c, at(time.Second)).err)
	assert.Nil(t, pts[0].cluster)
	assert.Equal(t, 5, c.points)
	require.NoError(t, stepNow(c, at(11*time.Second)).err)
	for _, pt := range pts {
		assert.NotNil(t, pt.cluster)
	}
	requireForgotten(t, c)
}

func TestASpikeOlderThanTheWindowIsLone(t *testing.T) {
	c := testClusters()
	c.add(lockKey, features{at: at(0), ratio: 10})
	stepNow(c, at(10*time.Minute))
	pt := c.add(lockKey, features{at: at(0), ratio: 10})
	res := stepNow(c, at(11*time.Minute))
	require.NoError(t, res.err)
	assert.Nil(t, pt.cluster)
	assert.Zero(t, res.approximate)
}

// A cluster that falls apart goes on in its largest part, and the other part
// is a new one.
func TestTheLargestPartOfAClusterKeepsItsID(t *testing.T) {
	c := testClusters()
	put := func(n int, from, step time.Duration) (pts []*point) {
		for i := range n {
			pts = append(pts, c.add(lockKey, features{at: at(from + time.Duration(i)*step), ratio: 10}))
		}
		return pts
	}
	small := put(6, 70*time.Second, 20*time.Millisecond)
	put(5, 70600*time.Millisecond, 10*time.Millisecond) // joins the two
	large := put(12, 71200*time.Millisecond, 20*time.Millisecond)
	stepNow(c, at(72*time.Second))
	first := small[0].cluster
	require.NotNil(t, first)
	require.Equal(t, first, large[0].cluster)
	assert.Equal(t, 23, first.size)
	assert.Equal(t, at(70*time.Second), first.start)
	assert.Equal(t, large[11].at, first.end)

	p := c.partitions[lockKey]
	labels := func(label func(i int) int32) (l []dbscan.Labelled) {
		for i := range 23 {
			x := dbscan.Labelled{ID: uint64(i + 1), Label: label(i)}
			x.Core = x.Label != dbscan.Noise
			l = append(l, x)
		}
		return l
	}
	ids, merged := p.identify(labels(func(i int) int32 {
		switch {
		case i < 6:
			return 0
		case i < 11:
			return dbscan.Noise
		default:
			return 1
		}
	}), 2)
	assert.Equal(t, []*cluster{nil, first}, ids)
	assert.Zero(t, merged)
}

// Two clusters that become one go on as the one with more core points, even if
// it is the younger, and that is said once.
func TestTheLargerOfTwoClustersKeepsItsID(t *testing.T) {
	c := testClusters()
	var small, large []*point
	for i := range 6 {
		small = append(small, c.add(lockKey, features{at: at(70*time.Second + time.Duration(i)*10*time.Millisecond), ratio: 10}))
	}
	for i := range 9 {
		large = append(large, c.add(lockKey, features{at: at(72*time.Second + time.Duration(i)*10*time.Millisecond), ratio: 10}))
	}
	stepNow(c, at(73*time.Second))
	loser, winner := small[0].cluster, large[0].cluster
	require.NotEqual(t, loser, winner)
	for i := range 20 {
		c.add(lockKey, features{at: at(70500*time.Millisecond + time.Duration(i)*80*time.Millisecond), ratio: 10})
	}
	res := stepNow(c, at(74*time.Second))
	assert.Equal(t, 1, res.merged)
	assert.Equal(t, winner, small[0].cluster)
	assert.Equal(t, 35, winner.size)
	assert.Zero(t, loser.size)
	for i := range 4 {
		res = stepNow(c, at(time.Duration(75+i)*time.Second))
		assert.Zero(t, res.merged, "said once")
		assert.Empty(t, res.over, "not a cluster that ended")
	}
}

// A cluster that is not found for a step or two, for instance because
// min_samples rose, is the same when it is found again. After three it is over.
func TestAClusterMayHideForAMoment(t *testing.T) {
	for _, tt := range []struct {
		hidden int
		same   bool
	}{{1, true}, {closeAfter - 1, true}, {closeAfter, false}} {
		c := testClusters()
		var pts []*point
		for i := range 6 {
			pts = append(pts, c.add(lockKey, features{at: at(70*time.Second + time.Duration(i)*10*time.Millisecond), ratio: 10}))
		}
		now := 71 * time.Second
		step := func() stepResult {
			now += time.Second
			return stepNow(c, at(now))
		}
		step()
		first := pts[0].cluster
		require.NotNil(t, first)
		c.cfg.MinSamples = 50
		over := 0
		for range tt.hidden {
			res := step()
			require.Zero(t, res.open)
			over += len(res.over)
		}
		assert.Equal(t, !tt.same, over == 1)
		c.cfg.MinSamples = 5
		require.Equal(t, 1, step().open)
		assert.Equal(t, tt.same, pts[0].cluster == first)
	}
}

// Clusters of different services and stages at one time are one incident; one
// that begins after a pause of more than eps is another.
func TestClustersAtOneTimeAreOneIncident(t *testing.T) {
	c := testClusters()
	burst := func(key partitionKey, from time.Duration) *point {
		var pt *point
		for i := range 6 {
			pt = c.add(key, features{at: at(from + time.Duration(i)*100*time.Millisecond), ratio: 10})
		}
		return pt
	}
	a := burst(partitionKey{"api", "chat", "lock"}, 70*time.Second)
	b := burst(partitionKey{"engine", "chat", "page_fault"}, 70200*time.Millisecond)
	d := burst(partitionKey{"engine", "embed", "lock"}, 71400*time.Millisecond) // 0.7 s after b's last
	e := burst(partitionKey{"api", "embed", "lock"}, 73*time.Second)            // 1.1 s after d's last
	stepNow(c, at(74*time.Second))
	for _, pt := range []*point{a, b, d, e} {
		require.NotNil(t, pt.cluster)
	}
	assert.Equal(t, a.cluster.incident, b.cluster.incident)
	assert.Equal(t, a.cluster.incident, d.cluster.incident)
	assert.NotEqual(t, a.cluster.incident.id, e.cluster.incident.id)
	assert.NotEqual(t, a.cluster.id, b.cluster.id)
	assert.Equal(t, a.cluster.id, a.cluster.incident.id, "named by its first cluster")

	// What comes between the two shows that they were one; ids stay.
	f := burst(partitionKey{"api", "chat", "run_queue"}, 72200*time.Millisecond)
	res := stepNow(c, at(75*time.Second))
	assert.Equal(t, 1, res.incidents)
	assert.Equal(t, a.cluster.incident, f.cluster.incident)
	assert.NotEqual(t, a.cluster.incident.id, e.cluster.incident.id)
	assert.Zero(t, stepNow(c, at(76*time.Second)).incidents, "said once")
	requireForgotten(t, c)
}

// With the classical axes, scales, eps and min_samples the answer is that of
// DBSCAN on those coordinates, to the letter.
func TestClassicalParametersAreExact(t *testing.T) {
	axis := func(name string, scale float64) AxisConfig { return AxisConfig{Name: name, Scale: scale} }
	for _, tt := range []struct {
		name    string
		columns []string
		change  func(*ClusteringConfig)
	}{
		{"o5_spikes3d", []string{axisTime, axisStage, axisLatency}, func(c *ClusteringConfig) {
			c.Axes = []AxisConfig{axis(axisTime, 0.5), axis(axisStage, 2), axis(axisLatency, 10)}
			c.Eps, c.MinSamples = 0.8, 5
		}},
		{"o6_requests2d", []string{axisLatency, axisHops}, func(c *ClusteringConfig) {
			c.Axes = []AxisConfig{axis(axisLatency, 1), axis(axisHops, 1)}
			c.Eps, c.MinSamples = 42.5, 87
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := defaultConfig()
			cfg.Clustering.Window, cfg.Clustering.PoissonBound = time.Hour, false
			tt.change(&cfg.Clustering)
			require.NoError(t, cfg.Validate())
			c := newClusters(cfg.Clustering, at(0))
			dir := filepath.Join("..", "..", "internal", "dbscan", "testdata", "open")
			rows, labels := readRows(t, filepath.Join(dir, tt.name+".csv")), readRows(t, filepath.Join(dir, tt.name+".labels.csv"))
			require.Len(t, labels, len(rows))
			for _, row := range rows {
				f := features{at: at(0), ratio: 1}
				for k, column := range tt.columns {
					switch column {
					case axisTime:
						f.at = at(time.Duration(math.Round(row[k] * 1e9)))
					case axisStage:
						f.stage = stage.Stage(row[k])
					case axisLatency:
						f.seconds = row[k] / 1e3
					case axisHops:
						f.hops = int(row[k])
					}
				}
				c.add(lockKey, f)
			}
			res := stepNow(c, at(time.Hour-time.Minute))
			require.NoError(t, res.err)
			require.Zero(t, res.approximate)
			p := c.partitions[lockKey]
			require.Len(t, p.labels, len(rows), "all are clustered")
			for _, l := range p.labels {
				want := labels[l.ID-1]
				require.Equal(t, want, []float64{float64(l.Label), map[bool]float64{true: 1}[l.Core]}, "row %d", l.ID)
			}
		})
	}
}

// readRows reads the numbers of a file with a header.
func readRows(t *testing.T, file string) (rows [][]float64) {
	t.Helper()
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	records, err := csv.NewReader(f).ReadAll()
	require.NoError(t, err)
	for _, rec := range records[1:] {
		var row []float64
		for _, s := range rec {
			x, err := strconv.ParseFloat(s, 64)
			require.NoError(t, err)
			row = append(row, x)
		}
		rows = append(rows, row)
	}
	return rows
}

func TestStagesAreNeighboursOnlyWhereTheyAreAnAxis(t *testing.T) {
	for _, byStage := range []bool{false, true} {
		cfg := defaultConfig().Clustering
		if byStage {
			cfg.Axes = append(cfg.Axes, AxisConfig{Name: axisStage, Scale: 100})
		}
		c := newClusters(cfg, at(0))
		lock, fault := exclusive[stage.Lock], exclusive[stage.PageFault]
		var pts []*point
		for i := range 8 {
			kind := []*seriesKind{lock, fault}[i%2]
			pts = append(pts, c.add(c.partitionOf("svc", "chat", kind), features{at: at(0), ratio: 10, stage: kind.stage}))
		}
		stepNow(c, at(time.Second))
		assert.Equal(t, byStage, pts[0].cluster != nil)
	}
	c := newClusters(ClusteringConfig{Axes: []AxisConfig{{Name: axisStage, Scale: 1}}}, 0)
	assert.NotEqual(t, c.partitionOf("s", "o", exclusive[stage.SendBuffer]), c.partitionOf("s", "o", plain[stage.SendBuffer]), "a socket total is not a stage")
	assert.NotEqual(t, c.partitionOf("s", "o", exclusive[stage.Lock]), c.partitionOf("s", "o", spanSeries))
}

func TestHopsAreTheServicesThatHaveCome(t *testing.T) {
	h := newHarness(t, func(c *Config) {
		c.Clustering.Axes = []AxisConfig{{Name: axisTime, Scale: 1}, {Name: axisHops, Scale: 1}}
	})
	spans := []span{{id: 1, name: "a", kind: server, to: 2 * time.Second}}
	h.send(makeTraces(1, app("front", spans...)))
	spans[0].id = 2
	h.send(makeTraces(1, app("front", spans...), app("engine", span{id: 3, parent: 2, name: "b", to: 2 * time.Second})))
	var hops []int
	for _, s := range h.p.buffer.first.spikes {
		hops = append(hops, s.point.hops)
	}
	assert.Equal(t, []int{1, 2, 2}, hops)
}
