package dbscan

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// grid holds the points sorted by the cell they lie in.
//
// A cell is a cube of side eps/√d, shortened by a hair: its diagonal is below
// eps, so all points of a cell are within eps of each other. Cells that can
// hold points within eps of a cell's points are found by the gap between the
// cubes, |Δ|-1 sides on each axis, and never by the distance of their centres.
//
// A cell's key packs its coordinates into 64 bits, axis 0 foremost. A step
// along other axes than the last adds a constant to the key, and the cells in
// reach along the last axis follow each other in key order. Neighbours are
// therefore found by walking the sorted keys; see walk.
type grid struct {
	dims int
	eps2 float64
	pts  []point // sorted by cell
	row  []int32 // row[i] is the input row of pts[i]

	cellKey  []uint64 // ascending
	cellFrom []int32  // cell c holds pts[cellFrom[c]:cellFrom[c+1]]

	shift [MaxDims]uint // of each axis's coordinate in a key
}

// reach returns how many cells away, on one axis, a cell can hold a point
// within eps: the largest k with (k-1)² ≤ d.
func reach(dims int) int { return 1 + int(math.Sqrt(float64(dims))) }

// newGrid sorts the points into cells. It reports false when the cells cannot
// be numbered in 64 bits.
func newGrid(points []float64, dims int, eps float64) (*grid, bool) {
	g := &grid{dims: dims, eps2: square(eps)}
	keys, ok := g.nearKeys(points, eps)
	if !ok {
		keys, ok = g.farKeys(points, eps)
	}
	if !ok {
		return nil, false
	}

	n := len(keys)
	g.row = make([]int32, n)
	for i := range g.row {
		g.row[i] = int32(i)
	}
	keys, g.row = sortByKey(keys, g.row)

	g.pts = make([]point, n)
	for i, r := range g.row {
		copy(g.pts[i][:dims], points[int(r)*dims:])
	}

	cells := 1
	for i := 1; i < n; i++ {
		if keys[i] != keys[i-1] {
			cells++
		}
	}
	g.cellKey = make([]uint64, 0, cells)
	g.cellFrom = make([]int32, 0, cells+1)
	for i, k := range keys {
		if i == 0 || k != keys[i-1] {
			g.cellKey = append(g.cellKey, k)
			g.cellFrom = append(g.cellFrom, int32(i))
		}
	}
	g.cellFrom = append(g.cellFrom, int32(n))
	return g, true
}

// cellSide returns the side of a cell when coordinates reach up to cells sides
// from their origin. A coordinate's rounding error grows with it (1.5 ulp for
// the subtraction and the division); the side is shortened by more than that.
func cellSide(dims int, eps, cells float64) float64 {
	return eps / math.Sqrt(float64(dims)) * (1 - 1e-9 - cells*0x1p-50)
}

// layOut gives each axis the bits that coordinates 0..last need, with room for
// reach on either side so that a step never spills into the next axis. It
// reports false when that takes more than 64 bits.
func (g *grid) layOut(last [MaxDims]uint64) bool {
	total := 0
	for k := g.dims - 1; k >= 0; k-- {
		g.shift[k] = uint(total)
		total += bits.Len64(last[k] + 2*uint64(reach(g.dims)))
	}
	return total <= 64
}

// nearKeys numbers cells from the smallest coordinate of each axis.
func (g *grid) nearKeys(points []float64, eps float64) ([]uint64, bool) {
	var lo, hi [MaxDims]float64
	copy(lo[:], points[:g.dims])
	hi = lo
	for i := 0; i < len(points); i += g.dims {
		for k, x := range points[i : i+g.dims] {
			lo[k] = min(lo[k], x)
			hi[k] = max(hi[k], x)
		}
	}
	cells := 0.0
	for k := range lo {
		cells = max(cells, (hi[k]-lo[k])/cellSide(g.dims, eps, 0))
	}
	if cells > 0x1p40 { // the side would no longer be nearly eps/√d
		return nil, false
	}
	perUnit := 1 / cellSide(g.dims, eps, cells)
	var last [MaxDims]uint64
	for k := range lo {
		last[k] = uint64((hi[k] - lo[k]) * perUnit)
	}
	if !g.layOut(last) {
		return nil, false
	}

	pad := uint64(reach(g.dims))
	keys := make([]uint64, 0, len(points)/g.dims)
	for i := 0; i < len(points); i += g.dims {
		key := uint64(0)
		for k, x := range points[i : i+g.dims] {
			key |= (uint64((x-lo[k])*perUnit) + pad) << g.shift[k]
		}
		keys = append(keys, key)
	}
	return keys, true
}

// farKeys numbers cells of data that is spread wide, such as values with a few
// enormous outliers. Where the sorted values of an axis leave a gap of more
// than eps, no two points on either side can be neighbours, and the gap is
// shortened to the fewest cells that keep them apart. An axis then takes no
// more than a few coordinates a point, however far the points lie.
func (g *grid) farKeys(points []float64, eps float64) ([]uint64, bool) {
	n := len(points) / g.dims
	perUnit := 1 / cellSide(g.dims, eps, 2*float64(n))
	apart := uint64(reach(g.dims)) + 1

	var last [MaxDims]uint64
	coords := make([]uint64, len(points))
	order := make([]int32, n)
	for k := range g.dims {
		at := func(i int32) float64 { return points[int(i)*g.dims+k] }
		for i := range order {
			order[i] = int32(i)
		}
		slices.SortFunc(order, func(a, b int32) int { return cmp.Compare(at(a), at(b)) })
		origin, base := at(order[0]), uint64(0)
		for j, i := range order {
			x := at(i)
			if j > 0 && x-at(order[j-1]) > eps { // so are their squares: rounding keeps squares of different numbers apart
				origin, base = x, last[k]+apart
			}
			last[k] = base + uint64((x-origin)*perUnit)
			coords[int(i)*g.dims+k] = last[k]
		}
	}
	if !g.layOut(last) {
		return nil, false
	}

	pad := uint64(reach(g.dims))
	keys := make([]uint64, n)
	for i := range keys {
		for k := range g.dims {
			keys[i] |= (coords[i*g.dims+k] + pad) << g.shift[k]
		}
	}
	return keys, true
}

// sortByKey sorts keys and rows together by key, stably, eight bits at a time
// from the lowest. It may use up its arguments and returns the sorted slices.
func sortByKey(keys []uint64, rows []int32) ([]uint64, []int32) {
	var all uint64
	for _, k := range keys {
		all |= k
	}
	keys2, rows2 := make([]uint64, len(keys)), make([]int32, len(rows))
	for shift := 0; shift < bits.Len64(all); shift += 8 {
		var next [256]int32
		for _, k := range keys {
			next[byte(k>>shift)]++
		}
		at := int32(0)
		for b, count := range next {
			next[b] = at
			at += count
		}
		for i, k := range keys {
			to := next[byte(k>>shift)]
			next[byte(k>>shift)]++
			keys2[to], rows2[to] = k, rows[i]
		}
		keys, keys2 = keys2, keys
		rows, rows2 = rows2, rows
	}
	return keys, rows
}

// walk finds the cells in reach of a cell among sorted keys. Asked for cells
// in ascending order, it never looks back: each step of the other axes has a
// place in keys that only moves on.
type walk struct {
	keys  []uint64
	steps []step
	place []int32 // of each step, the first key not below the last one asked for
}

// step is one way to leave a cell along all axes but the last.
type step struct {
	delta uint64 // what it adds to the key, modulo 2⁶⁴
	along uint64 // how far along the last axis cells are then still in reach
	after bool   // whether it leads to larger keys
}

// newWalk returns a walk over keys; with later set it finds only cells with
// larger keys than the one asked for, so that each pair is met once.
func (g *grid) newWalk(keys []uint64, later bool) *walk {
	w := &walk{keys: keys}
	for _, s := range g.steps() {
		if !later || s.after || s.delta == 0 {
			w.steps = append(w.steps, s)
		}
	}
	w.place = make([]int32, len(w.steps))
	return w
}

// steps lists all steps that stay in reach, short ones first: where a search
// ends with the first find, it ends soon.
func (g *grid) steps() []step {
	type far struct {
		step
		gap2, off2 int
	}
	all := []far{{}}
	r := reach(g.dims)
	for k := range g.dims - 1 {
		var next []far
		for _, f := range all {
			for off := -r; off <= r; off++ {
				t := f
				t.delta += uint64(int64(off)) << g.shift[k]
				t.gap2 += gap(off) * gap(off)
				t.off2 += off * off
				if f.off2 == 0 {
					t.after = off > 0
				}
				if t.gap2 <= g.dims {
					next = append(next, t)
				}
			}
		}
		all = next
	}
	slices.SortStableFunc(all, func(a, b far) int { return cmp.Compare(a.off2, b.off2) })
	steps := make([]step, len(all))
	for i, f := range all {
		along := 1
		for f.gap2+gap(along+1)*gap(along+1) <= g.dims {
			along++
		}
		f.along = uint64(along)
		steps[i] = f.step
	}
	return steps
}

// gap is the number of whole cells between cells off apart on an axis.
func gap(off int) int { return max(off-1, -off-1, 0) }

// run is a range of cells that follow each other.
type run struct{ from, to int32 }

// at appends to runs the non-empty cells in reach of the cell with this key.
// The cell itself is among them if it is among the keys and the walk is not of
// later cells only.
func (w *walk) at(key uint64, later bool, runs []run) []run {
	keys := w.keys
	for i := range w.steps {
		s := &w.steps[i]
		lo, hi := key+s.delta-s.along, key+s.delta+s.along
		if later && s.delta == 0 {
			lo = key + 1
		}
		from := int(w.place[i])
		for from < len(keys) && keys[from] < lo {
			from++
		}
		w.place[i] = int32(from)
		to := from
		for to < len(keys) && keys[to] <= hi {
			to++
		}
		if to > from {
			runs = append(runs, run{int32(from), int32(to)})
		}
	}
	return runs
}
