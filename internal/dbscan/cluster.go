package dbscan

import (
	"cmp"
	"math"
	"slices"
)

// cluster labels the grid's points into res, whose labels are all Noise. It
// changes the order of points within their cells.
func (g *grid) cluster(minSamples int, res *Result) {
	cores := g.findCores(minSamples)
	for _, c := range cores {
		for _, r := range g.row[c.from:c.to] {
			res.Core[r] = true
		}
	}
	g.join(cores)
	res.Clusters = g.number(cores)
	for _, c := range cores {
		for _, r := range g.row[c.from:c.to] {
			res.Labels[r] = c.cluster
		}
	}
	g.findBorders(cores, res.Labels)
}

// coreCell is a cell that holds core points.
type coreCell struct {
	key      uint64
	from, to int32 // its core points are pts[from:to], before all others of the cell
	parent   int32 // in the union-find forest over core cells; its own index at a root
	cluster  int32 // its label, once numbered
	box      box   // around its core points
}

// findCores returns the cells with core points in key order, and moves core
// points to the front of their cells.
func (g *grid) findCores(minSamples int) []coreCell {
	var cores []coreCell
	w := g.newWalk(g.cellKey, false)
	var runs []run
	for c, key := range g.cellKey {
		from, to := g.cellFrom[c], g.cellFrom[c+1]
		end := to
		if int(to-from) < minSamples { // else they are all core: they reach each other
			runs = w.at(key, false, runs[:0])
			inReach := 0
			for i := range runs {
				// Cells of a run follow each other, and so do their points.
				r := &runs[i]
				r.from, r.to = g.cellFrom[r.from], g.cellFrom[r.to]
				inReach += int(r.to - r.from)
			}
			if inReach < minSamples {
				continue
			}
			end = from
			for i := from; i < to; i++ {
				if g.isCore(i, runs, inReach, minSamples) {
					g.swap(i, end)
					end++
				}
			}
		}
		if end > from {
			cores = append(cores, coreCell{
				key: key, from: from, to: end,
				parent: int32(len(cores)),
				box:    boxOf(g.pts[from:end]),
			})
		}
	}
	return cores
}

// isCore counts the points within eps of point i among inReach points in runs,
// until it is known whether there are minSamples.
func (g *grid) isCore(i int32, runs []run, inReach, minSamples int) bool {
	p := g.pts[i]
	missing := minSamples
	for _, r := range runs {
		if inReach < missing {
			return false
		}
		inReach -= int(r.to - r.from)
		pts := g.pts[r.from:r.to]
		for j := range pts {
			if dist2(&p, &pts[j]) <= g.eps2 {
				if missing--; missing == 0 {
					return true
				}
			}
		}
	}
	return false
}

func (g *grid) swap(i, j int32) {
	g.pts[i], g.pts[j] = g.pts[j], g.pts[i]
	g.row[i], g.row[j] = g.row[j], g.row[i]
}

// join unites core cells that hold core points within eps of each other. Cells
// that are of one cluster already are not looked at again.
func (g *grid) join(cores []coreCell) {
	keys := make([]uint64, len(cores))
	for i := range cores {
		keys[i] = cores[i].key
	}
	w := g.newWalk(keys, true)
	var runs []run
	for a := range cores {
		runs = w.at(keys[a], true, runs[:0])
		for _, r := range runs {
			for b := r.from; b < r.to; b++ {
				ra, rb := root(cores, int32(a)), root(cores, b)
				if ra == rb {
					continue
				}
				ca, cb := &cores[a], &cores[b]
				if g.touch(ca.from, ca.to, &ca.box, cb.from, cb.to, &cb.box) {
					cores[max(ra, rb)].parent = min(ra, rb)
				}
			}
		}
	}
}

// root returns the root of a core cell's tree, and shortens the way to it.
func root(cores []coreCell, i int32) int32 {
	for cores[i].parent != i {
		cores[i].parent = cores[cores[i].parent].parent
		i = cores[i].parent
	}
	return i
}

// fewPairs is the number of pairs below which trying them all beats splitting.
const fewPairs = 64

// touch reports whether a point of pts[aFrom:aTo], whose box is a, is within
// eps of one of pts[bFrom:bTo], whose box is b. When the boxes do not tell, it
// splits the longer one and asks again, nearer half first; it moves points
// within their range.
func (g *grid) touch(aFrom, aTo int32, a *box, bFrom, bTo int32, b *box) bool {
	if a.gap2(b) > g.eps2 {
		return false
	}
	if a.span2(b) <= g.eps2 {
		return true
	}
	if int64(aTo-aFrom)*int64(bTo-bFrom) <= fewPairs {
		for i := aFrom; i < aTo; i++ {
			for j := bFrom; j < bTo; j++ {
				if dist2(&g.pts[i], &g.pts[j]) <= g.eps2 {
					return true
				}
			}
		}
		return false
	}

	axis, length := a.widest()
	if bAxis, bLength := b.widest(); bLength > length {
		axis, length = bAxis, bLength
		aFrom, aTo, a, bFrom, bTo, b = bFrom, bTo, b, aFrom, aTo, a
	}
	// Neither half is empty: length > 0, as span2 > gap2, and lo ≤ cut < hi.
	cut := a.lo[axis] + length/2
	if cut >= a.hi[axis] {
		cut = a.lo[axis]
	}
	mid := aFrom
	for i := aFrom; i < aTo; i++ {
		if g.pts[i][axis] <= cut {
			g.swap(i, mid)
			mid++
		}
	}
	near, far := run{aFrom, mid}, run{mid, aTo}
	nearBox, farBox := boxOf(g.pts[near.from:near.to]), boxOf(g.pts[far.from:far.to])
	if farBox.gap2(b) < nearBox.gap2(b) {
		near, far = far, near
		nearBox, farBox = farBox, nearBox
	}
	return g.touch(near.from, near.to, &nearBox, bFrom, bTo, b) ||
		g.touch(far.from, far.to, &farBox, bFrom, bTo, b)
}

// number gives the clusters their numbers, by their smallest core row, and
// returns how many there are.
func (g *grid) number(cores []coreCell) int {
	first := make(map[int32]int32) // root -> smallest row of a core point
	for i := range cores {
		r := root(cores, int32(i))
		row, ok := first[r]
		if !ok {
			row = math.MaxInt32
		}
		for _, x := range g.row[cores[i].from:cores[i].to] {
			row = min(row, x)
		}
		first[r] = row
	}
	roots := make([]int32, 0, len(first))
	for r := range first {
		roots = append(roots, r)
	}
	slices.SortFunc(roots, func(a, b int32) int { return cmp.Compare(first[a], first[b]) })
	for n, r := range roots {
		cores[r].cluster = int32(n)
	}
	for i := range cores {
		cores[i].cluster = cores[root(cores, int32(i))].cluster
	}
	return len(roots)
}

// findBorders labels the points that are not core but in reach of one.
func (g *grid) findBorders(cores []coreCell, labels []int32) {
	keys := make([]uint64, len(cores))
	for i := range cores {
		keys[i] = cores[i].key
	}
	w := g.newWalk(keys, false)
	var runs []run
	own := 0 // the first core cell at or after the current cell
	for c, key := range g.cellKey {
		from, to := g.cellFrom[c], g.cellFrom[c+1]
		for own < len(keys) && keys[own] < key {
			own++
		}
		if own < len(keys) && keys[own] == key {
			from = cores[own].to // past its core points
		}
		if from == to {
			continue
		}
		runs = w.at(key, false, runs[:0])
		for i := from; i < to; i++ {
			if c := g.lowestInReach(&g.pts[i], cores, runs); c != math.MaxInt32 {
				labels[g.row[i]] = c
			}
		}
	}
}

// lowestInReach returns the smallest cluster number with a core point within
// eps of p among the core cells in runs, or math.MaxInt32.
func (g *grid) lowestInReach(p *point, cores []coreCell, runs []run) int32 {
	lowest := int32(math.MaxInt32)
	for _, r := range runs {
		for i := r.from; i < r.to; i++ {
			c := &cores[i]
			if c.cluster >= lowest || c.box.gapTo2(p) > g.eps2 {
				continue
			}
			pts := g.pts[c.from:c.to]
			for j := range pts {
				if dist2(p, &pts[j]) <= g.eps2 {
					lowest = c.cluster
					break
				}
			}
		}
	}
	return lowest
}
