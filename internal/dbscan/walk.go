package dbscan

import (
	"cmp"
	"slices"
)

// reach returns how many cells away, on one axis, a cell can hold a point
// within eps: the largest k with (k-1)² ≤ d.
func reach(dims int) int {
	k := 1
	for k*k <= dims {
		k++
	}
	return k
}

// gap is the number of whole cells between cells off apart on an axis.
func gap(off int) int { return max(off-1, -off-1, 0) }

// step is one way to leave a cell along all axes but the first and the last.
type step struct {
	delta uint64 // what it adds to the key, modulo 2⁶⁴
	along uint64 // how far along the last axis cells are then still in reach
	after bool   // whether it leads to larger keys
}

// stepsTo lists the steps to cells in reach that are off slabs away, short ones
// first: where a search ends with the first find, it ends soon.
func stepsTo(off, dims int, shift *[MaxDims]uint) []step {
	type far struct {
		step
		gap2, off2 int
	}
	all := []far{{gap2: gap(off) * gap(off)}}
	r := reach(dims)
	for k := 1; k < dims-1; k++ {
		var next []far
		for _, f := range all {
			for o := -r; o <= r; o++ {
				t := f
				t.delta += uint64(int64(o)) << shift[k]
				t.gap2 += gap(o) * gap(o)
				t.off2 += o * o
				if f.off2 == 0 {
					t.after = o > 0
				}
				if t.gap2 <= dims {
					next = append(next, t)
				}
			}
		}
		all = next
	}
	slices.SortStableFunc(all, func(a, b far) int { return cmp.Compare(a.off2, b.off2) })
	steps := make([]step, len(all))
	for i, f := range all {
		along := 0
		for dims > 1 && f.gap2+gap(along+1)*gap(along+1) <= dims {
			along++
		}
		f.along = uint64(along)
		steps[i] = f.step
	}
	return steps
}

// walk finds the cells in reach of a slab's cells. Asked for cells in ascending
// order, it never looks back: for each step there is a place in the keys of the
// slab it leads to, and the places only move on. It is asked for several cells
// at a time, so that one place moves on through all of them.
type walk struct {
	paths  []path
	later  bool // only cells after the one asked for, so that each pair is met once
	stride int  // runs of one cell
	runs   []run
	count  [atATime]int32
}

// path is one step to one slab.
type path struct {
	step
	slab  int32
	own   bool // the slab of the cells asked for
	keys  []uint64
	place int32
}

// run is a range of cells of a slab that follow each other.
type run struct{ slab, from, to int32 }

// atATime is the number of cells that a walk is asked for at a time.
const atATime = 32

// walkFrom prepares the walk for the cells of slab i. With cores set it leads to
// cells with core points only.
func (g *grid) walkFrom(i int, cores, later bool) *walk {
	w := &g.walk
	w.later, w.paths = later, w.paths[:0]
	r := reach(g.dims)
	for hop := range 2*r + 1 { // 0, 1, -1, 2, -2, …: near slabs first
		off := (hop + 1) / 2
		if hop%2 == 0 {
			off = -off
		}
		if later && off < 0 {
			continue
		}
		j := g.away(i, off)
		if j < 0 {
			continue
		}
		keys := g.slabs[j].keys
		if cores {
			keys = g.slabs[j].coreKeys
		}
		for _, s := range g.steps[r+off] {
			if !later || off > 0 || s.after || s.delta == 0 {
				w.paths = append(w.paths, path{step: s, slab: int32(j), own: off == 0, keys: keys})
			}
		}
	}
	w.stride = len(w.paths)
	if len(w.runs) < atATime*w.stride {
		w.runs = make([]run, atATime*w.stride)
	}
	return w
}

// away returns the index of the slab off coordinates from slab i, or -1.
func (g *grid) away(i, off int) int {
	to := g.slabs[i].at + int64(off)
	d := 1
	if off < 0 {
		d = -1
	}
	for j := i; j >= 0 && j < len(g.slabs); j += d {
		if at := g.slabs[j].at; at == to {
			return j
		} else if (at > to) == (d > 0) && at != to {
			return -1
		}
	}
	return -1
}

// fill finds the runs of up to atATime cells; see found.
func (w *walk) fill(cells []uint64) {
	clear(w.count[:len(cells)])
	for p := range w.paths {
		p := &w.paths[p]
		keys := p.keys
		from := int(p.place)
		to := from
		onward := w.later && p.own && p.delta == 0
		for i, key := range cells {
			lo, hi := key+p.delta-p.along, key+p.delta+p.along
			if onward {
				lo = key + 1
			}
			for from < len(keys) && keys[from] < lo {
				from++
			}
			to = max(to, from)
			for to < len(keys) && keys[to] <= hi {
				to++
			}
			if to > from {
				w.runs[i*w.stride+int(w.count[i])] = run{p.slab, int32(from), int32(to)}
				w.count[i]++
			}
		}
		p.place = int32(from)
	}
}

// found returns the non-empty cells in reach of the i-th cell asked for. The
// cell itself is among them if it is among the keys and the walk is not of later
// cells only.
func (w *walk) found(i int) []run {
	return w.runs[i*w.stride:][:w.count[i]]
}
