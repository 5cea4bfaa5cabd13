package dbscan

import (
	"cmp"
	"math/bits"
	"slices"
)

// maxReach is the largest reach.
const maxReach = 3

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

// walk finds the cells in reach of a slab's cells. Where the keys of a slab lie
// close together, a bitmap tells where a key stands among them; see keyMap.
// Otherwise the walk has a place in the keys of the slab for each step that leads
// to it. As it is asked for cells in ascending order, places only move on. It is
// asked for several cells at a time, to take one step from all of them in a row.
type walk struct {
	paths  []path
	later  bool // only cells after the one asked for, so that each pair is met once
	stride int  // runs of one cell
	runs   []run
	count  [atATime]int32
	maps   [2*maxReach + 1]keyMap // of the slabs around, by slab modulo their number
}

// path is one step to one slab.
type path struct {
	step
	slab   int32
	own    bool // the slab of the cells asked for
	keys   []uint64
	keyMap *keyMap // of keys, nil if they have none
	place  int32   // without one, the first key that is not before all that is asked for
}

// run is a range of cells of a slab that follow each other.
type run struct{ slab, from, to int32 }

// atATime is the number of cells that a walk is asked for at a time.
const atATime = 32

// startWalks forgets the bitmaps: the slabs or what is looked for have changed.
func (g *grid) startWalks() {
	for i := range g.walk.maps {
		g.walk.maps[i].slab = -1
	}
}

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
		m := &w.maps[j%len(w.maps)]
		if m.slab != j {
			m.slab = j
			m.build(keys)
		}
		if len(m.words) == 0 {
			m = nil
		}
		for _, s := range g.steps[r+off] {
			if !later || off > 0 || s.after || s.delta == 0 {
				w.paths = append(w.paths, path{step: s, slab: int32(j), own: off == 0, keys: keys, keyMap: m})
			}
		}
	}
	w.stride = len(w.paths) + 1 // fill writes one beyond
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
	for i := range w.paths {
		p := &w.paths[i]
		// The first key after the one asked for begins the run where only
		// later cells are wanted along the own line.
		before := p.along
		if w.later && p.own && p.delta == 0 {
			before = ^uint64(0) // minus one
		}
		if p.keyMap != nil {
			w.fillMapped(p, before, cells)
		} else {
			w.fillPlaced(p, before, cells)
		}
	}
}

func (w *walk) fillPlaced(p *path, before uint64, cells []uint64) {
	keys := p.keys
	from := int(p.place)
	to := from
	for i, key := range cells {
		lo, hi := key+p.delta-before, key+p.delta+p.along
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

func (w *walk) fillMapped(p *path, before uint64, cells []uint64) {
	m := p.keyMap
	lo, hi := p.delta-before-m.first, p.delta+p.along+1-m.first
	at := 0
	for i, key := range cells {
		from, to := m.count(int64(key+lo)), m.count(int64(key+hi))
		// Written in any case: whether the run is empty is hard to foretell.
		n := w.count[i]
		w.runs[at+int(n)] = run{p.slab, from, to}
		if from < to {
			n++
		}
		w.count[i] = n
		at += w.stride
	}
}

// found returns the non-empty cells in reach of the i-th cell asked for. The
// cell itself is among them if it is among the keys and the walk is not of later
// cells only.
func (w *walk) found(i int) []run {
	return w.runs[i*w.stride:][:w.count[i]]
}

// keyMap tells how many keys of a slab are below a key: a bit for each possible
// key from the first to the last, and for each 64 of them how many came before.
type keyMap struct {
	slab  int    // whose keys, by index
	first uint64 // the key of the first bit
	words []word // one more than there are bits for; empty if there is no map
}

type word struct {
	bits   uint64
	before int32
}

// wordsPerKey and fewWords bound the size of a map: beyond it, filling it costs
// too much.
const (
	wordsPerKey = 2
	fewWords    = 64
)

func (m *keyMap) build(keys []uint64) {
	m.words = m.words[:0]
	if len(keys) == 0 {
		return
	}
	m.first = keys[0]
	n := (keys[len(keys)-1]-m.first)/64 + 2
	if n > uint64(wordsPerKey*len(keys)+fewWords) {
		return
	}
	m.words = slices.Grow(m.words, int(n))[:n]
	clear(m.words)
	for _, k := range keys {
		m.words[(k-m.first)/64].bits |= 1 << ((k - m.first) % 64)
	}
	before := 0
	for i := range m.words {
		m.words[i].before = int32(before)
		before += bits.OnesCount64(m.words[i].bits)
	}
}

// count returns how many keys are less than bit far from the first.
func (m *keyMap) count(bit int64) int32 {
	bit = min(max(bit, 0), int64(len(m.words)-1)*64)
	w := &m.words[bit/64]
	return w.before + int32(bits.OnesCount64(w.bits&(1<<(bit%64)-1)))
}
