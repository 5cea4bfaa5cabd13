package spikesamplingprocessor

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/ebpfllm/ebpfllm/internal/dbscan"
)

// closeAfter is the number of steps in a row in which a cluster must not be
// found before it is over: one that its min_samples, or a spike that left the
// window, hides for a moment keeps its id.
const closeAfter = 3

// cluster is a cluster over its life: its id never changes.
type cluster struct {
	id  string
	seq uint64
	key partitionKey

	// The step's:
	start    int64 // of its spikes, ns since the epoch
	end      int64
	size     int // spikes, those that left the window included
	missing  int // steps in a row in which it was not found
	over     bool
	merged   bool // it turned out to be one with an older one
	incident *incident

	// Under the processor's lock:
	mark   clusterMark // as of the last step
	traces int         // decided whose top spike is of it
	kept   int         // of these
}

// incident is a set of clusters, of any services and stages, at one time. Its
// id is that of its first cluster.
type incident struct {
	id         string
	start, end int64 // of its clusters
	merged     bool  // it turned out to be one with an older one
}

// identify tells which cluster each label of a step is: the one that it has
// most core points in common with. When one cluster falls apart, its largest
// part goes on; when several become one, the one with most core points does, of
// equals the older. labelled are the points in the window, as l says.
func (p *partition) identify(labels []dbscan.Labelled, n int) (ids []*cluster, merged int) {
	type pair struct {
		label int32
		of    *cluster
	}
	common := map[pair]int{}
	for _, l := range labels {
		if pt := p.points[l.ID]; l.Core && pt.core && pt.in != nil && !pt.in.over {
			common[pair{l.Label, pt.in}]++
		}
	}
	pairs := make([]pair, 0, len(common))
	for x := range common {
		pairs = append(pairs, x)
	}
	slices.SortFunc(pairs, func(a, b pair) int {
		return cmp.Or(cmp.Compare(common[b], common[a]), cmp.Compare(a.of.seq, b.of.seq), cmp.Compare(a.label, b.label))
	})
	ids = make([]*cluster, n)
	taken := map[*cluster]bool{}
	for _, x := range pairs {
		if ids[x.label] == nil && !taken[x.of] {
			ids[x.label], taken[x.of] = x.of, true
			x.of.merged = false
		}
	}
	for _, x := range pairs {
		if !taken[x.of] && !x.of.merged {
			x.of.merged = true
			merged++
		}
	}
	return ids, merged
}

// begin makes a cluster whose id follows from its partition and first spike, so
// that the same input gives the same id.
func (c *clusters) begin(key partitionKey, first *point) *cluster {
	c.seq++
	h := fnv.New64a()
	fmt.Fprintf(h, "%q %q %q %d %v %d", key.service, key.operation, key.series, first.at, first.ratio, c.seq)
	return &cluster{
		id: fmt.Sprintf("%016x", h.Sum64()), seq: c.seq, key: key,
		start: first.at, end: first.at,
	}
}

// join puts a new cluster into the oldest incident of its time, or begins one.
func (c *clusters) join(cl *cluster) {
	for _, in := range c.incidents {
		if c.meet(in, cl.start, cl.end) {
			cl.incident = in
			in.extend(cl)
			return
		}
	}
	cl.incident = &incident{id: cl.id, start: cl.start, end: cl.end}
	c.incidents = append(c.incidents, cl.incident)
}

// meet tells whether an incident is at most eps away in time.
func (c *clusters) meet(in *incident, start, end int64) bool {
	return start <= in.end+c.pause && end >= in.start-c.pause
}

func (in *incident) extend(cl *cluster) {
	in.start, in.end = min(in.start, cl.start), max(in.end, cl.end)
}

// settleIncidents forgets the incidents that the window has left behind, and
// counts those that turn out to be one with an older one. They keep their ids,
// which may have been sent; what begins from now on belongs to the older.
func (c *clusters) settleIncidents(now int64) (merged int) {
	c.incidents = slices.DeleteFunc(c.incidents, func(in *incident) bool {
		return in.end+c.pause < now-c.cfg.Window.Nanoseconds()
	})
	for i, in := range c.incidents {
		for _, older := range c.incidents[:i] {
			if !in.merged && c.meet(older, in.start, in.end) {
				in.merged = true
				merged++
			}
		}
	}
	return merged
}
