package spikesamplingprocessor

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/dbscan"
)

// Bounds of what is clustered. Spikes beyond them count as lone.
const (
	maxPartition  = 100_000
	maxPoints     = 500_000
	maxPartitions = 10_000
)

// partitionKey is what spikes must have in common to be neighbours.
type partitionKey struct{ service, operation, series string }

// partitionOf returns the partition of a spike. Where stages are an axis, they
// share one; the socket totals, which overlap with the stages, have their own,
// and so have spans.
func (c *clusters) partitionOf(service, operation string, kind *seriesKind) partitionKey {
	series := kind.name
	if c.cfg.has(axisStage) && kind != spanSeries {
		series = "stages"
		if kind.socket {
			series = "socket stages"
		}
	}
	return partitionKey{service, operation, series}
}

// point is a spike among those that are clustered.
type point struct {
	features
	cluster *cluster // nil until it belongs to one; what was decided stays
	core    bool     // when it was last in a cluster
	final   bool     // its trace was decided
}

// partition is the sliding window over the spikes of one series.
type partition struct {
	key        partitionKey
	window     *dbscan.Window
	points     map[uint64]*point // in the window, by the id in the window
	nextID     uint64
	background background
	bounds     [backgroundWarm]int // the Poisson bound after each of the last slices
	open       []*cluster
	over       bool // a spike did not fit since the last step
	labels     []dbscan.Labelled
}

// clusters finds out which spikes belong together.
type clusters struct {
	cfg        ClusteringConfig
	axes       axes
	pause      int64         // ns: the longest between clusters of one incident
	slice      time.Duration // in which the background is counted: the window must hold one whole when it is settled
	partitions map[partitionKey]*partition
	order      []*partition // by creation, so that steps are deterministic
	incidents  []*incident  // oldest first
	points     int
	seq        uint64
	scratch    []float64
}

func newClusters(cfg ClusteringConfig, epoch int64) *clusters {
	return &clusters{
		cfg: cfg, axes: newAxes(cfg, epoch),
		pause:      max(cfg.timeReach(), cfg.Stride).Nanoseconds(),
		slice:      cfg.Window / backgroundWarm,
		partitions: map[partitionKey]*partition{},
	}
}

func (c *clusters) newWindow() *dbscan.Window {
	width := c.cfg.Window.Seconds() / c.axes.axes[0].Scale
	if c.axes.timeless {
		return dbscan.NewTimelessWindow(len(c.axes.axes)-1, width, c.cfg.Eps, c.cfg.MinSamples)
	}
	return dbscan.NewWindow(len(c.axes.axes), width, c.cfg.Eps, c.cfg.MinSamples)
}

// add puts a spike into its partition's window.
func (c *clusters) add(key partitionKey, f features) *point {
	pt := &point{features: f}
	p, ok := c.partitions[key]
	if !ok {
		if len(c.partitions) >= maxPartitions {
			return pt
		}
		p = &partition{key: key, window: c.newWindow(), points: map[uint64]*point{}}
		c.partitions[key] = p
		c.order = append(c.order, p)
	}
	if len(p.points) >= maxPartition || c.points >= maxPoints {
		p.over = true
		return pt
	}
	p.nextID++
	c.scratch = c.axes.place(c.scratch[:0], f)
	if err := p.window.Add(p.nextID, c.scratch); err != nil {
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

// stepResult is what a step found.
type stepResult struct {
	open        int // clusters
	approximate int // partitions with more spikes than are clustered, or too intricate ones
	merged      int // clusters that turned out to be one with another
	incidents   int // incidents that turned out to be one with an older one
	over        []*cluster
	err         error
}

// step moves all windows to now and labels their spikes.
func (c *clusters) step(now int64) stepResult {
	var res stepResult
	kept := c.order[:0]
	for _, p := range c.order {
		if err := c.stepPartition(p, now, &res); err != nil {
			res.err = errors.Join(res.err, fmt.Errorf("clustering %s %s %s: %w", p.key.service, p.key.operation, p.key.series, err))
		}
		if p.over {
			res.approximate++
			p.over = false
		}
		if len(p.points) == 0 && len(p.open) == 0 && p.background.idle() {
			delete(c.partitions, p.key)
			continue
		}
		kept = append(kept, p)
	}
	clear(c.order[len(kept):])
	c.order = kept
	res.incidents = c.settleIncidents(now)
	return res
}

func (c *clusters) stepPartition(p *partition, now int64, res *stepResult) error {
	c.count(p, now)
	if err := p.window.SetMinSamples(c.minSamples(p)); err != nil {
		return err
	}
	// The window's end is not part of it: a spike of this very moment is.
	snap, err := p.window.Step(c.axes.time(now + 1e6))
	if err != nil {
		return err
	}
	res.open += snap.Clusters
	p.over = p.over || snap.Approximate
	c.forget(p, now)

	p.labels = slices.AppendSeq(p.labels[:0], p.window.Labels())
	ids, merged := p.identify(p.labels, snap.Clusters)
	res.merged += merged
	for label, first := range p.firsts(snap.Clusters, ids) {
		if first != nil {
			ids[label] = c.begin(p.key, first)
			p.open = append(p.open, ids[label])
		}
	}
	for _, l := range p.labels {
		pt := p.points[l.ID]
		if l.Label == dbscan.Noise {
			continue
		}
		pt.core = l.Core
		cl := ids[l.Label]
		if pt.cluster == nil || pt.cluster != cl && !pt.final {
			if pt.cluster != nil {
				pt.cluster.size--
			}
			pt.cluster = cl
			cl.size++
			cl.start, cl.end = min(cl.start, pt.at), max(cl.end, pt.at)
		}
	}
	c.close(p, ids, res)
	return nil
}

// forget drops the points that the window has dropped.
func (c *clusters) forget(p *partition, now int64) {
	if len(p.points) == p.window.Len() {
		return
	}
	start := c.axes.time(now+1e6) - c.cfg.Window.Seconds()/c.axes.axes[0].Scale
	for id, pt := range p.points {
		if c.axes.time(pt.at) < start {
			delete(p.points, id)
			c.points--
		}
	}
}

// firsts returns the first spike of each label that has no identity yet, nil
// for the others.
func (p *partition) firsts(n int, ids []*cluster) []*point {
	firsts := make([]*point, n)
	id := make([]uint64, n)
	for _, l := range p.labels {
		if l.Label == dbscan.Noise || ids[l.Label] != nil {
			continue
		}
		pt, first := p.points[l.ID], &firsts[l.Label]
		if *first == nil || pt.at < (*first).at || pt.at == (*first).at && l.ID < id[l.Label] {
			*first, id[l.Label] = pt, l.ID
		}
	}
	return firsts
}

// close ends the clusters that were not found for some steps, and brings the
// others into their incidents.
func (c *clusters) close(p *partition, ids []*cluster, res *stepResult) {
	for _, cl := range p.open {
		cl.missing++
	}
	for _, cl := range ids {
		cl.missing = 0
		if cl.incident == nil {
			c.join(cl)
		}
		cl.incident.extend(cl)
	}
	p.open = slices.DeleteFunc(p.open, func(cl *cluster) bool {
		if cl.missing < closeAfter {
			return false
		}
		cl.over = true
		if !cl.merged {
			res.over = append(res.over, cl)
		}
		return true
	})
}

// count tells the background of the slices whose spikes have found their
// clusters.
func (c *clusters) count(p *partition, now int64) {
	slice := c.slice.Nanoseconds()
	settled := now - c.cfg.ClusterWait.Nanoseconds() - c.cfg.Stride.Nanoseconds()
	done := (settled - c.axes.epoch) / slice // slices that are over
	if p.background.next >= done {
		return
	}
	counts := map[int64]int{}
	for _, pt := range p.points {
		i := (pt.at - c.axes.epoch) / slice
		if pt.cluster == nil || !warm(i) && pt.cluster.end-pt.cluster.start > slice {
			counts[i]++
		}
	}
	// A partition that is new had none before.
	for p.background.next = max(p.background.next, done-backgroundSlices); p.background.next < done; {
		p.background.put(counts[p.background.next])
		expected := p.background.perSlice() / c.slice.Seconds() * 2 * c.cfg.timeReach().Seconds()
		p.bounds[p.background.next%int64(len(p.bounds))] = dbscan.PoissonMinSamples(expected)
	}
}

// minSamples returns the configured value or, if that is more, the number of
// spikes that the partition's background puts within eps of each other by
// accident with a chance of one in a million. It rises at once and falls after a
// window, so that one that wavers does not close and open clusters.
func (c *clusters) minSamples(p *partition) int {
	if !c.cfg.PoissonBound {
		return c.cfg.MinSamples
	}
	return max(c.cfg.MinSamples, slices.Max(p.bounds[:]))
}
