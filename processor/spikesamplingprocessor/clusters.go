package spikesamplingprocessor

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/dbscan"
)

// The axes of clustering, in units of eps: spikes are neighbours when they are
// close in time and alike in size. With the default eps of 0.8 that is 0.8 s
// and a factor of three.
const (
	timeScale  = 1.0 // seconds
	ratioScale = 2.0 // powers of two above the baseline
)

// Bounds of what is clustered. Spikes beyond them count as lone.
const (
	maxPartition  = 100_000
	maxPoints     = 500_000
	maxPartitions = 10_000
)

// partitionKey is what spikes must have in common to be neighbours.
type partitionKey struct{ service, operation, series string }

// point is a spike's place on the axes of its partition.
type point struct {
	at      int64 // ns since the epoch
	ratio   float64
	cluster *cluster // nil until it belongs to one; then it stays unless an older one takes over before release
	final   bool     // its trace was decided
}

// cluster is a cluster over its life: its id never changes.
type cluster struct {
	id   string
	seq  uint64
	kept int // traces
}

// partition is the sliding window over the spikes of one series.
type partition struct {
	key    partitionKey
	window *dbscan.Window
	points map[uint64]*point // in the window, by the id in the window
	nextID uint64
	open   int  // clusters at the last step
	over   bool // a spike did not fit since the last step
}

// clusters finds out which spikes belong together.
type clusters struct {
	cfg        ClusteringConfig
	epoch      int64 // ns: where the time axis begins
	partitions map[partitionKey]*partition
	order      []*partition // by creation, so that steps are deterministic
	points     int
	seq        uint64
}

func newClusters(cfg ClusteringConfig, epoch int64) *clusters {
	return &clusters{cfg: cfg, epoch: epoch, partitions: map[partitionKey]*partition{}}
}

// add puts a spike at time at into its partition's window. ratio is its size
// over the baseline.
func (c *clusters) add(key partitionKey, at int64, ratio float64) *point {
	pt := &point{at: at, ratio: ratio}
	p, ok := c.partitions[key]
	if !ok {
		if len(c.partitions) >= maxPartitions {
			return pt
		}
		p = &partition{
			key:    key,
			window: dbscan.NewWindow(2, c.cfg.Window.Seconds()/timeScale, c.cfg.Eps, c.cfg.MinSamples),
			points: map[uint64]*point{},
		}
		c.partitions[key] = p
		c.order = append(c.order, p)
	}
	if len(p.points) >= maxPartition || c.points >= maxPoints {
		p.over = true
		return pt
	}
	p.nextID++
	if err := p.window.Add(p.nextID, []float64{c.axis(at), math.Log2(ratio) / ratioScale}); err != nil {
		// Older than the window: nothing it could be a neighbour of is left.
		if !errors.Is(err, dbscan.ErrExpired) {
			p.over = true
		}
		return pt
	}
	p.points[p.nextID] = pt
	c.points++
	return pt
}

func (c *clusters) axis(at int64) float64 {
	return time.Duration(at-c.epoch).Seconds() / timeScale
}

// stepResult is what a step found.
type stepResult struct {
	open        int // clusters
	approximate int // partitions with more spikes than are clustered
	merged      int // clusters that turned out to be one with an older one
	err         error
}

// step moves all windows to now and labels their spikes.
func (c *clusters) step(now int64) stepResult {
	var res stepResult
	kept := c.order[:0]
	for _, p := range c.order {
		merged, err := c.stepPartition(p, now)
		if err != nil {
			res.err = errors.Join(res.err, fmt.Errorf("clustering %s %s %s: %w", p.key.service, p.key.operation, p.key.series, err))
		}
		res.merged += merged
		if p.over {
			res.approximate++
			p.over = false
		}
		if len(p.points) == 0 {
			delete(c.partitions, p.key)
			continue
		}
		res.open += p.open
		kept = append(kept, p)
	}
	clear(c.order[len(kept):])
	c.order = kept
	return res
}

func (c *clusters) stepPartition(p *partition, now int64) (merged int, err error) {
	if err := p.window.SetMinSamples(c.minSamples(p, now)); err != nil {
		return 0, err
	}
	// The window's end is not part of it: a spike of this very moment is.
	end := c.axis(now) + 1e-3
	snap, err := p.window.Step(end)
	if err != nil {
		return 0, err
	}
	p.open = snap.Clusters
	c.points -= len(p.points)
	old := p.points
	p.points = make(map[uint64]*point, len(snap.Points))
	for id, pt := range old {
		if c.axis(pt.at) >= end {
			p.points[id] = pt // the window has not reached it yet
		}
	}
	ids := make([]*cluster, snap.Clusters)
	for _, l := range snap.Points {
		pt := old[l.ID]
		p.points[l.ID] = pt
		if l.Label == dbscan.Noise || pt.cluster == nil {
			continue
		}
		// The oldest cluster that is known among the points goes on.
		if id := &ids[l.Label]; *id == nil || pt.cluster.seq < (*id).seq {
			*id = pt.cluster
		}
	}
	c.points += len(p.points)
	lost := map[*cluster]bool{}
	for _, l := range snap.Points {
		if l.Label == dbscan.Noise {
			continue
		}
		pt, id := p.points[l.ID], ids[l.Label]
		if id == nil {
			id = c.name(p.key, pt)
			ids[l.Label] = id
		}
		if pt.cluster == nil || !pt.final {
			if pt.cluster != nil && pt.cluster != id {
				lost[pt.cluster] = true
			}
			pt.cluster = id
		} else if pt.cluster != id {
			lost[pt.cluster] = true
		}
	}
	return len(lost), nil
}

// name makes a cluster whose id follows from its partition and first spike, so
// that the same input gives the same id.
func (c *clusters) name(key partitionKey, first *point) *cluster {
	c.seq++
	h := fnv.New64a()
	fmt.Fprintf(h, "%q %q %q %d %v %d", key.service, key.operation, key.series, first.at, first.ratio, c.seq)
	return &cluster{id: fmt.Sprintf("%016x", h.Sum64()), seq: c.seq}
}

// minSamples returns the configured value or, if that is more, the number of
// spikes that the partition's background puts within eps of each other by
// accident with a chance of one in a million. The background are the spikes of
// the window that found no cluster although all their neighbours have come.
func (c *clusters) minSamples(p *partition, now int64) int {
	ball := 2 * c.cfg.Eps * timeScale // seconds
	settled := now - c.cfg.ClusterWait.Nanoseconds() - int64(ball*float64(time.Second))
	background := 0
	for _, pt := range p.points {
		if pt.cluster == nil && pt.at < settled {
			background++
		}
	}
	rate := float64(background) / c.cfg.Window.Seconds()
	return max(c.cfg.MinSamples, dbscan.PoissonMinSamples(rate*ball))
}
