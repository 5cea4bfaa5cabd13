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
	key partitionKey
	features

	// Under the processor's lock:
	cluster *cluster // as of the last step, nil if it belongs to none; what was decided stays
	final   bool     // its trace was decided

	// The step's:
	in      *cluster
	core    bool // when it was last in a cluster
	settled bool // final, as of the step's beginning
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
//
// A step takes its time, and the processor does not stand still for it: under
// the processor's lock spikes are added and settled, and what a step found is
// published; the step itself works on what is its own.
type clusters struct {
	// Under the processor's lock:
	arrived []*point // since the last step
	decided []*point // settled since the last step

	// The step's:
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
	surveyAt   int64 // ns: when distances are next measured
}

func newClusters(cfg ClusteringConfig, epoch int64) *clusters {
	return &clusters{
		cfg: cfg, axes: newAxes(cfg, epoch),
		pause:      max(cfg.timeReach(), cfg.Stride).Nanoseconds(),
		slice:      cfg.Window / backgroundWarm,
		partitions: map[partitionKey]*partition{},
		surveyAt:   epoch + cfg.Window.Nanoseconds(),
	}
}

func (c *clusters) newWindow() *dbscan.Window {
	width := c.cfg.Window.Seconds() / c.axes.axes[0].Scale
	if c.axes.timeless {
		return dbscan.NewTimelessWindow(len(c.axes.axes)-1, width, c.cfg.Eps, c.cfg.MinSamples)
	}
	return dbscan.NewWindow(len(c.axes.axes), width, c.cfg.Eps, c.cfg.MinSamples)
}

// add lets the next step know of a spike.
func (c *clusters) add(key partitionKey, f features) *point {
	pt := &point{key: key, features: f}
	// Those that are too many say so when they find their partition full; this
	// only bounds the memory until then.
	if len(c.arrived) <= maxPoints {
		c.arrived = append(c.arrived, pt)
	}
	return pt
}

// settle notes that the spike's trace was decided: its cluster stays.
func (c *clusters) settle(pt *point) {
	pt.final = true
	c.decided = append(c.decided, pt)
}

// news is what a step has to know of what happened since the last.
type news struct{ arrived, decided []*point }

// take returns the news, under the lock.
func (c *clusters) take() news {
	n := news{c.arrived, c.decided}
	c.arrived, c.decided = nil, nil
	return n
}

// insert puts a spike into its partition's window.
func (c *clusters) insert(pt *point) {
	p, ok := c.partitions[pt.key]
	if !ok {
		if len(c.partitions) >= maxPartitions {
			return
		}
		p = &partition{key: pt.key, window: c.newWindow(), points: map[uint64]*point{}}
		c.partitions[pt.key] = p
		c.order = append(c.order, p)
	}
	if len(p.points) >= maxPartition || c.points >= maxPoints {
		p.over = true
		return
	}
	p.nextID++
	c.scratch = c.axes.place(c.scratch[:0], pt.features)
	if err := p.window.Add(p.nextID, c.scratch); err != nil {
		// Older than the window: nothing it could be a neighbour of is left.
		if !errors.Is(err, dbscan.ErrExpired) {
			p.over = true
		}
		return
	}
	p.points[p.nextID] = pt
	c.points++
}

// stepResult is what a step found.
type stepResult struct {
	open        int // clusters
	approximate int // partitions with more spikes than are clustered, or too intricate ones
	merged      int // clusters that turned out to be one with another
	incidents   int // incidents that turned out to be one with an older one
	over        []*cluster
	distances   []float64 // of some spikes to their min_samples-th nearest, once in a window
	err         error

	moved []*point   // that came into a cluster or changed it
	found []*cluster // all that are there
}

// publish makes what a step found known to the decisions, under the lock.
func (res *stepResult) publish() {
	for _, cl := range res.found {
		cl.mark = clusterMark{id: cl.id, incident: cl.incident.id, start: cl.start, end: cl.end, size: cl.size}
	}
	for _, pt := range res.moved {
		if pt.cluster == nil || !pt.final { // decided while the step went on
			pt.cluster = pt.in
		}
	}
}

// step moves all windows to now and labels their spikes.
func (c *clusters) step(n news, now int64) stepResult {
	for _, pt := range n.decided {
		pt.settled = true
	}
	for _, pt := range n.arrived {
		c.insert(pt)
	}
	var res stepResult
	survey := now >= c.surveyAt
	if survey {
		c.surveyAt = now + c.cfg.Window.Nanoseconds()
	}
	kept := c.order[:0]
	for _, p := range c.order {
		if err := c.stepPartition(p, now, &res); err != nil {
			res.err = errors.Join(res.err, fmt.Errorf("clustering %s %s %s: %w", p.key.service, p.key.operation, p.key.series, err))
		}
		if survey {
			res.distances = c.survey(p, res.distances)
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
		if pt.in == nil || pt.in != cl && !pt.settled {
			if pt.in != nil {
				pt.in.size--
			}
			pt.in = cl
			res.moved = append(res.moved, pt)
			cl.size++
			cl.start, cl.end = min(cl.start, pt.at), max(cl.end, pt.at)
		}
	}
	c.close(p, ids, res)
	res.found = append(res.found, ids...)
	return nil
}

// surveyed bounds the spikes of a partition whose distances are measured, each to
// all others: half a million spikes take 50 ms, once in a window.
const surveyed = 50

// survey appends the distances of some of the partition's spikes to their
// min_samples-th nearest one, by which eps can be chosen. A distance above
// farAway, and that of a spike that has no such neighbour, is farAway.
func (c *clusters) survey(p *partition, distances []float64) []float64 {
	points := c.scratch[:0]
	for _, l := range p.labels { // in a fixed order
		points = c.axes.place(points, p.points[l.ID].features)
		if c.axes.timeless { // time only says when a spike comes and goes
			last := len(points) - len(c.axes.axes)
			points = append(points[:last], points[last+1:]...)
		}
	}
	c.scratch = points
	var of []int
	for i := 0; i < len(p.labels); i += (len(p.labels) + surveyed - 1) / surveyed {
		of = append(of, i)
	}
	for _, d := range dbscan.KDistances(points, len(c.cfg.Axes), c.cfg.MinSamples, of) {
		distances = append(distances, min(d, farAway))
	}
	return distances
}

// farAway is the largest eps that may be configured.
const farAway = 100

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
		if pt.in == nil || !warm(i) && pt.in.end-pt.in.start > slice {
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
