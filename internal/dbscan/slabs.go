package dbscan

import (
	"math"
	"slices"
)

// slabs are the points of a sliding window, kept by slabs of time from step to
// step. What has to be found anew follows from which slabs changed:
//
//   - core points, in slabs within reach of a changed one;
//   - joins to later slabs, where either side's core points were found anew
//     (grid.joinAll says why the other joins stay right);
//   - the core cells that other points are in reach of, within reach of
//     those slabs.
//
// The forest is rebuilt from the known joins and the clusters are numbered anew
// in every step: both are quick, as they deal with cells and not with points.
type slabs struct {
	grid    *grid
	dims    int
	n       int // points
	side    float64
	begin   point // where cells are counted from
	began   bool
	shift   [MaxDims]uint
	half    uint64  // the coordinate of begin on axes other than time
	changed []int64 // coordinates of the slabs whose points came or went since the last step
	stale   bool    // no step since the slabs were made
	spare   []*slab // empty

	// Scratch of arrange.
	keys  []uint64
	place []int32
	old   slab
}

// maxSpare is the number of empty slabs kept for their memory.
const maxSpare = 16

// farthest is how many cells from where counting begins a cell may be: no more
// than leave the cells' side nearly eps/√d.
const farthest = 1 << 32

// newSlabs returns slabs without points.
func newSlabs(dims int, eps float64) *slabs {
	s := &slabs{dims: dims, side: cellSide(dims, eps, farthest), stale: true}
	bits := uint(32)
	if dims == MaxDims {
		bits = 21
	}
	for k := 1; k < dims; k++ {
		s.shift[k] = bits * uint(dims-1-k)
	}
	s.half = 1 << (bits - 1)
	s.grid = newGrid(dims, eps, 1, &s.shift)
	return s
}

// slabsOf returns slabs with the points, or nil if they do not fit.
func slabsOf(p *points, dims int, eps float64) *slabs {
	s := newSlabs(dims, eps)
	if !s.step(math.Inf(-1), p) {
		return nil
	}
	return s
}

// cell returns the slab and the key of a point. It reports false where that is
// too far from where counting began.
func (s *slabs) cell(p *point) (at int64, key uint64, ok bool) {
	c := math.Floor((p[0] - s.begin[0]) / s.side)
	if !(math.Abs(c) < farthest) {
		return 0, 0, false
	}
	room := float64(s.half) - float64(reach(s.dims)) - 1
	for k := 1; k < s.dims; k++ {
		x := math.Floor((p[k] - s.begin[k]) / s.side)
		if !(math.Abs(x) < room) {
			return 0, 0, false
		}
		key |= uint64(int64(x)+int64(s.half)) << s.shift[k]
	}
	return int64(c), key, true
}

// step forgets the points before start and takes those that come. It reports
// false, and takes none, if one of them does not fit.
func (s *slabs) step(start float64, come *points) bool {
	if !s.began && len(come.ids) > 0 {
		copy(s.begin[:s.dims], come.at)
		s.began = true
	}
	var p point
	for i := range come.ids {
		copy(p[:s.dims], come.at[i*s.dims:])
		if _, _, ok := s.cell(&p); !ok {
			s.expire(start)
			return false
		}
	}
	s.expire(start)

	var grown []*slab
	var to *slab
	for i, id := range come.ids {
		copy(p[:s.dims], come.at[i*s.dims:])
		at, _, _ := s.cell(&p)
		if to == nil || to.at != at {
			to = s.slab(at)
			if len(s.changed) == 0 || s.changed[len(s.changed)-1] != at {
				s.changed = append(s.changed, at)
			}
			grown = append(grown, to)
		}
		to.pts, to.row, to.ids = append(to.pts, p), append(to.row, come.row[i]), append(to.ids, id)
	}
	s.n += len(come.ids)
	slices.Sort(s.changed)
	s.changed = slices.Compact(s.changed)
	for _, g := range grown {
		if len(g.pts) != int(g.from[len(g.keys)]) {
			s.arrange(g)
		}
	}
	return true
}

// slab returns the slab at a coordinate, a new one if need be.
func (s *slabs) slab(at int64) *slab {
	i := s.grid.find(at)
	if i < len(s.grid.slabs) && s.grid.slabs[i].at == at {
		return s.grid.slabs[i]
	}
	b := &slab{ids: []uint64{}}
	if n := len(s.spare); n > 0 {
		b, s.spare = s.spare[n-1], s.spare[:n-1]
	}
	b.at = at
	b.setCells(nil)
	s.grid.slabs = slices.Insert(s.grid.slabs, i, b)
	return b
}

// expire forgets the points before start. Time only grows from slab to slab.
func (s *slabs) expire(start float64) {
	gone := 0
	for _, b := range s.grid.slabs {
		kept := 0
		for i := range b.pts {
			if b.pts[i][0] >= start {
				b.pts[kept], b.row[kept], b.ids[kept] = b.pts[i], b.row[i], b.ids[i]
				kept++
			}
		}
		if kept == len(b.pts) {
			break
		}
		s.n -= len(b.pts) - kept
		s.changed = append(s.changed, b.at)
		b.pts, b.row, b.ids = b.pts[:kept], b.row[:kept], b.ids[:kept]
		if kept > 0 {
			s.arrange(b)
			break
		}
		gone++
		if len(s.spare) < maxSpare {
			b.setCells(nil)
			s.spare = append(s.spare, b)
		}
	}
	s.grid.slabs = slices.Delete(s.grid.slabs, 0, gone)
}

// arrange sorts the points of a slab by cell.
func (s *slabs) arrange(b *slab) {
	s.keys, s.place = s.keys[:0], s.place[:0]
	for i := range b.pts {
		_, key, _ := s.cell(&b.pts[i])
		s.keys, s.place = append(s.keys, key), append(s.place, int32(i))
	}
	keys, place := sortByKey(s.keys, s.place)
	old := &s.old
	old.pts, old.row, old.ids = append(old.pts[:0], b.pts...), append(old.row[:0], b.row...), append(old.ids[:0], b.ids...)
	for i, from := range place {
		b.pts[i], b.row[i], b.ids[i] = old.pts[from], old.row[from], old.ids[from]
	}
	b.setCells(keys)
}

// label finds the clusters after a step.
func (s *slabs) label(minSamples int) Snapshot {
	g := s.grid
	g.refill(s.n)
	r := int64(reach(s.dims))
	n := len(g.slabs)
	cores, joins, borders := make([]bool, n), make([]bool, n), make([]bool, n)
	mark := func(marks []bool, from, to int64) {
		for i := g.find(from); i < n && g.slabs[i].at <= to; i++ {
			marks[i] = true
		}
	}
	if s.stale || g.minSamples != minSamples {
		g.minSamples, s.stale = minSamples, false
		for i := range cores {
			cores[i] = true
		}
	}
	for _, at := range s.changed {
		mark(cores, at-r, at+r)
	}
	s.changed = s.changed[:0]
	g.startWalks()
	for i, again := range cores {
		if again {
			at := g.slabs[i].at
			mark(joins, at-r, at)
			mark(borders, at-r, at+r)
			g.slabs[i].approximate = false
			g.findCores(i)
		}
	}
	g.joinAll(func(i int) bool { return joins[i] })
	snap := Snapshot{Points: s.n, Clusters: g.number()}
	g.startWalks()
	for i, b := range g.slabs {
		if borders[i] {
			g.findBorders(i, false)
		}
		core, border := b.sizes()
		snap.Core += core
		snap.Noise += len(b.pts) - core - border
		snap.Approximate = snap.Approximate || b.approximate
	}
	return snap
}

// sizes counts the core points and the border points.
func (b *slab) sizes() (core, border int) {
	for i := range b.cores {
		core += int(b.cores[i].to - b.cores[i].from)
	}
	for i, p := range b.borders {
		if i == 0 || p.point != b.borders[i-1].point {
			border++
		}
	}
	return core, border
}

// labels gives all points with their labels.
func (s *slabs) labels(yield func(Labelled) bool) {
	for i, b := range s.grid.slabs {
		labels, core := s.grid.labelsOf(i)
		for p, id := range b.ids {
			if !yield(Labelled{id, labels[p], core[p]}) {
				return
			}
		}
	}
}

// points appends all points, in no particular order.
func (s *slabs) points(to *points) {
	for _, b := range s.grid.slabs {
		for i := range b.pts {
			to.add(b.ids[i], b.row[i], b.pts[i][:s.dims])
		}
	}
}
