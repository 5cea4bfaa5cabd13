package dbscan

import "slices"

// slab holds the points whose cells have the same coordinate on axis 0. Axis 0
// is time in a stream, so points come and go by slabs, and what a slab knows
// of itself stays right until a slab near it changes.
type slab struct {
	at  int64   // the coordinate
	pts []point // sorted by cell
	row []int32 // row[i] is the place of pts[i] in the input
	ids []uint64

	// Cell c has the key keys[c], ascending, and the points
	// pts[from[c]:from[c+1]], of which those before coreEnd[c] are core.
	keys    []uint64
	from    []int32
	coreEnd []int32

	// The cells with core points, in key order, and their keys.
	cores    []coreCell
	coreKeys []uint64

	joins   []join       // see grid.join
	borders []borderPair // by point
	// approximate tells that the work ran out while this slab was looked at.
	approximate bool
}

// coreCell is a cell that holds core points.
type coreCell struct {
	from, to int32 // its core points are pts[from:to]
	first    int32 // their smallest row
	box      box   // around them
}

// cellRef names a core cell relative to a slab: slabs places further on.
type cellRef struct{ slabs, cell int32 }

// join is a pair of core cells that have points within eps of each other.
type join struct {
	cell int32 // of this slab
	with cellRef
}

// borderPair is a point that is not core, and a core cell that it is in reach of.
type borderPair struct {
	point int32
	of    cellRef
}

// swap exchanges two points.
func (s *slab) swap(i, j int32) {
	s.pts[i], s.pts[j] = s.pts[j], s.pts[i]
	s.row[i], s.row[j] = s.row[j], s.row[i]
	if s.ids != nil {
		s.ids[i], s.ids[j] = s.ids[j], s.ids[i]
	}
}

// setCells notes where the cells are, given the key of each point.
func (s *slab) setCells(keys []uint64) {
	s.keys, s.from = s.keys[:0], s.from[:0]
	for i, k := range keys {
		if i == 0 || k != keys[i-1] {
			s.keys = append(s.keys, k)
			s.from = append(s.from, int32(i))
		}
	}
	s.from = append(s.from, int32(len(keys)))
}

// findFirst finds the smallest row of each core cell.
func (s *slab) findFirst() {
	for i := range s.cores {
		c := &s.cores[i]
		c.first = slices.Min(s.row[c.from:c.to])
	}
}

// find returns the first slab at or after a coordinate.
func (g *grid) find(at int64) int {
	lo, hi := 0, len(g.slabs)
	for lo < hi {
		mid := (lo + hi) / 2
		if g.slabs[mid].at < at {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}
