package dbscan

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// A cell is a cube of side eps/√d, shortened by a hair: its diagonal is below
// eps, so all points of a cell are within eps of each other. Cells that can
// hold points within eps of a cell's points are found by the gap between the
// cubes, |Δ|-1 sides on each axis, and never by the distance of their centres.
//
// A cell's key packs its coordinates into 64 bits, axis 0 foremost. A step
// along other axes than the last adds a constant to the key, and the cells in
// reach along the last axis follow each other in key order. Neighbours are
// therefore found by walking the sorted keys; see walk.

// layout numbers the cells of points at hand.
type layout struct {
	dims  int
	shift [MaxDims]uint // of each axis's coordinate in a key
}

// gridOf sorts points into cells. It reports false when the cells cannot be
// numbered in 64 bits.
func gridOf(points []float64, dims int, eps float64, minSamples int) (*grid, bool) {
	l := layout{dims: dims}
	keys, ok := l.nearKeys(points, eps)
	if !ok {
		keys, ok = l.farKeys(points, eps)
	}
	if !ok {
		return nil, false
	}
	n := len(keys)
	row := make([]int32, n)
	for i := range row {
		row[i] = int32(i)
	}
	keys, row = sortByKey(keys, row)
	pts := make([]point, n)
	for i, r := range row {
		copy(pts[i][:dims], points[int(r)*dims:])
	}

	// Slabs and their cells share the memory of the whole.
	slabs, cells := 0, 0
	for i, k := range keys {
		if i == 0 || k != keys[i-1] {
			cells++
			if i == 0 || k>>l.shift[0] != keys[i-1]>>l.shift[0] {
				slabs++
			}
		}
	}
	g := newGrid(dims, eps, minSamples, &l.shift)
	g.slabs = make([]*slab, 0, slabs)
	all := make([]slab, slabs)
	cellKeys, cellFrom := make([]uint64, 0, cells), make([]int32, 0, cells+slabs)
	mask := uint64(1)<<l.shift[0] - 1
	for from := 0; from < n; {
		at := keys[from] >> l.shift[0]
		to := from
		for to < n && keys[to]>>l.shift[0] == at {
			keys[to] &= mask
			to++
		}
		s := &all[len(g.slabs)]
		s.at, s.pts, s.row = int64(at), pts[from:to:to], row[from:to:to]
		s.keys, s.from = cellKeys[len(cellKeys):], cellFrom[len(cellFrom):]
		s.setCells(keys[from:to])
		cellKeys, cellFrom = cellKeys[:len(cellKeys)+len(s.keys)], cellFrom[:len(cellFrom)+len(s.from)]
		g.slabs = append(g.slabs, s)
		from = to
	}
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
func (l *layout) layOut(last [MaxDims]uint64) bool {
	total := 0
	for k := l.dims - 1; k >= 0; k-- {
		l.shift[k] = uint(total)
		total += bits.Len64(last[k] + 2*uint64(reach(l.dims)))
	}
	return total <= 64
}

// nearKeys numbers cells from the smallest coordinate of each axis.
func (l *layout) nearKeys(points []float64, eps float64) ([]uint64, bool) {
	var lo, hi [MaxDims]float64
	copy(lo[:], points[:l.dims])
	hi = lo
	for i := 0; i < len(points); i += l.dims {
		for k, x := range points[i : i+l.dims] {
			lo[k] = min(lo[k], x)
			hi[k] = max(hi[k], x)
		}
	}
	cells := 0.0
	for k := range lo {
		cells = max(cells, (hi[k]-lo[k])/cellSide(l.dims, eps, 0))
	}
	if cells > 0x1p40 { // the side would no longer be nearly eps/√d
		return nil, false
	}
	perUnit := 1 / cellSide(l.dims, eps, cells)
	var last [MaxDims]uint64
	for k := range lo {
		last[k] = uint64((hi[k] - lo[k]) * perUnit)
	}
	if !l.layOut(last) {
		return nil, false
	}

	pad := uint64(reach(l.dims))
	keys := make([]uint64, 0, len(points)/l.dims)
	for i := 0; i < len(points); i += l.dims {
		key := uint64(0)
		for k, x := range points[i : i+l.dims] {
			key |= (uint64((x-lo[k])*perUnit) + pad) << l.shift[k]
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
func (l *layout) farKeys(points []float64, eps float64) ([]uint64, bool) {
	n := len(points) / l.dims
	perUnit := 1 / cellSide(l.dims, eps, 2*float64(n))
	apart := uint64(reach(l.dims)) + 1

	var last [MaxDims]uint64
	coords := make([]uint64, len(points))
	order := make([]int32, n)
	for k := range l.dims {
		at := func(i int32) float64 { return points[int(i)*l.dims+k] }
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
			coords[int(i)*l.dims+k] = last[k]
		}
	}
	if !l.layOut(last) {
		return nil, false
	}

	pad := uint64(reach(l.dims))
	keys := make([]uint64, n)
	for i := range keys {
		for k := range l.dims {
			keys[i] |= (coords[i*l.dims+k] + pad) << l.shift[k]
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
