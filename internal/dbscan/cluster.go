package dbscan

import (
	"cmp"
	"math"
	"slices"
)

// grid is a clustering at work: what is known of the slabs, and what the work
// may cost. Window keeps one from step to step.
type grid struct {
	dims       int
	eps2       float64
	minSamples int
	slabs      []*slab  // by coordinate
	steps      [][]step // stepsTo(off) at reach+off
	walk       walk     // scratch

	// forest is the union-find forest over all core cells, those of slab i
	// from base[i] on. The root of a tree is its last cell.
	base   []int32
	forest []int32
	label  []int32 // of each core cell, once numbered

	labels []int32 // see labelsOf
	core   []bool

	budget int64 // comparisons that may still be made
}

func newGrid(dims int, eps float64, minSamples int, shift *[MaxDims]uint) *grid {
	g := &grid{dims: dims, eps2: square(eps), minSamples: minSamples}
	r := reach(dims)
	for off := -r; off <= r; off++ {
		g.steps = append(g.steps, stepsTo(off, dims, shift))
	}
	return g
}

// The work budget, in comparisons of two points. Spikes over a background need
// less than ten a point; layouts made to defeat every short cut need thousands.
const (
	budgetBase     = 1 << 22
	budgetPerPoint = 400
)

// refill sets the budget for n points.
func (g *grid) refill(n int) { g.budget = budgetBase + budgetPerPoint*int64(n) }

// spend takes n comparisons from the budget. It reports false when they are
// not there: then the caller decides without looking at single points, and the
// answer is approximate.
func (g *grid) spend(n int, s *slab) bool {
	if g.budget < int64(n) {
		g.budget = min(g.budget, 0)
		s.approximate = true
		return false
	}
	g.budget -= int64(n)
	return true
}

// findCores finds the core points of slab i and moves them to the front of
// their cells. It depends on the points of all slabs in reach.
func (g *grid) findCores(i int) {
	s := g.slabs[i]
	s.coreEnd = append(s.coreEnd[:0], s.from[:len(s.keys)]...)
	w := g.walkFrom(i, false, false)
	var keys [atATime]uint64
	var cells [atATime]int32
	n := 0
	look := func() {
		w.fill(keys[:n])
		for k, c := range cells[:n] {
			s.coreEnd[c] = g.coresOf(s, c, w.found(k))
		}
		n = 0
	}
	for c, key := range s.keys {
		if int(s.from[c+1]-s.from[c]) >= g.minSamples {
			s.coreEnd[c] = s.from[c+1] // they reach each other
			continue
		}
		keys[n], cells[n] = key, int32(c)
		if n++; n == atATime {
			look()
		}
	}
	look()

	n = 0
	for c := range s.keys {
		if s.coreEnd[c] > s.from[c] {
			n++
		}
	}
	s.cores, s.coreKeys = slices.Grow(s.cores[:0], n), slices.Grow(s.coreKeys[:0], n)
	for c, key := range s.keys {
		from, to := s.from[c], s.coreEnd[c]
		if from == to {
			continue
		}
		s.cores = append(s.cores, coreCell{from: from, to: to, box: boxOf(s.pts[from:to])})
		s.coreKeys = append(s.coreKeys, key)
	}
	s.findFirst()
}

// coresOf moves the core points of a cell to its front and returns where they
// end. The runs are the cells in reach.
func (g *grid) coresOf(s *slab, c int32, runs []run) int32 {
	from, to := s.from[c], s.from[c+1]
	inReach := 0
	for _, r := range runs {
		t := g.slabs[r.slab]
		inReach += int(t.from[r.to] - t.from[r.from])
	}
	end := from
	if inReach < g.minSamples {
		return end
	}
	for i := from; i < to; i++ {
		if g.isCore(s, &s.pts[i], runs, inReach) {
			s.swap(i, end)
			end++
		}
	}
	return end
}

// isCore counts the points within eps of p among inReach points in runs, until
// it is known whether there are minSamples.
func (g *grid) isCore(s *slab, p *point, runs []run, inReach int) bool {
	missing := g.minSamples
	for _, r := range runs {
		if inReach < missing {
			return false
		}
		t := g.slabs[r.slab]
		pts := t.pts[t.from[r.from]:t.from[r.to]]
		inReach -= len(pts)
		if !g.spend(len(pts), s) {
			// The first point of a cell stands for all of it.
			for c := r.from; c < r.to; c++ {
				if dist2(p, &t.pts[t.from[c]]) <= g.eps2 {
					missing -= int(t.from[c+1] - t.from[c])
				}
			}
			if missing <= 0 {
				return true
			}
			continue
		}
		for j := range pts {
			if dist2(p, &pts[j]) <= g.eps2 {
				if missing--; missing == 0 {
					g.budget += int64(len(pts) - j - 1)
					return true
				}
			}
		}
	}
	return false
}

// joinAll builds the forest: core cells with core points within eps of each
// other come into one tree. again tells for which slabs their joins have to be
// found anew; those of the others are known.
//
// Slabs are taken from the last to the first, each with those after it, and a
// pair of cells that is in one tree already is not looked at. So the joins of a
// slab and of those after it are all that is needed to connect what is connected
// among them, without help from earlier slabs. That is why they stay right when
// earlier slabs go, or when points are added anywhere: these can only make a
// join superfluous.
func (g *grid) joinAll(again func(i int) bool) {
	g.base = g.base[:0]
	n := int32(0)
	for _, s := range g.slabs {
		g.base = append(g.base, n)
		n += int32(len(s.cores))
	}
	g.forest = slices.Grow(g.forest[:0], int(n))[:n]
	for i := range g.forest {
		g.forest[i] = int32(i)
	}
	g.startWalks()
	for i, s := range slices.Backward(g.slabs) {
		if again(i) {
			g.findJoins(i)
			continue
		}
		for _, j := range s.joins {
			a, b := g.root(g.base[i]+j.cell), g.root(g.base[i+int(j.with.slabs)]+j.with.cell)
			g.forest[min(a, b)] = max(a, b)
		}
	}
}

// root returns the root of a core cell's tree, and shortens the way to it.
func (g *grid) root(i int32) int32 {
	f := g.forest
	for f[i] != i {
		f[i] = f[f[i]]
		i = f[i]
	}
	return i
}

// findJoins finds the joins of slab i with itself and later slabs.
func (g *grid) findJoins(i int) {
	s := g.slabs[i]
	s.joins = s.joins[:0]
	w := g.walkFrom(i, true, true)
	for c := 0; c < len(s.coreKeys); c += atATime {
		block := s.coreKeys[c:min(c+atATime, len(s.coreKeys))]
		w.fill(block)
		for k := range block {
			a := int32(c + k)
			ra := g.root(g.base[i] + a)
			ca := &s.cores[a]
			for _, r := range w.found(k) {
				t := g.slabs[r.slab]
				base := g.base[r.slab]
				for b := r.from; b < r.to; b++ {
					if g.forest[base+b] == ra {
						continue
					}
					rb := g.root(base + b)
					if ra == rb {
						continue
					}
					cb := &t.cores[b]
					if !g.touch(s, ca.from, ca.to, &ca.box, t, cb.from, cb.to, &cb.box) {
						continue
					}
					g.forest[min(ra, rb)] = max(ra, rb)
					ra = max(ra, rb)
					s.joins = append(s.joins, join{a, cellRef{r.slab - int32(i), b}})
				}
			}
		}
	}
}

// splitCost is what moving a point into a half and putting a box around it
// costs, in comparisons.
const splitCost = 4

// fewPairs is the number of pairs below which trying them all beats splitting.
const fewPairs = 64

// touch reports whether a point of s.pts[aFrom:aTo], whose box is a, is within
// eps of one of t.pts[bFrom:bTo], whose box is b. When the boxes do not tell, it
// splits the longer one and asks again, nearer half first; it moves points
// within their range. Without a budget, boxes in reach of each other will do.
func (g *grid) touch(s *slab, aFrom, aTo int32, a *box, t *slab, bFrom, bTo int32, b *box) bool {
	if a.gap2(b) > g.eps2 {
		return false
	}
	if a.span2(b) <= g.eps2 {
		return true
	}
	if pairs := int64(aTo-aFrom) * int64(bTo-bFrom); pairs <= fewPairs {
		if !g.spend(int(pairs), s) {
			return true
		}
		for i := aFrom; i < aTo; i++ {
			for j := bFrom; j < bTo; j++ {
				if dist2(&s.pts[i], &t.pts[j]) <= g.eps2 {
					return true
				}
			}
		}
		return false
	}

	axis, length := a.widest()
	if bAxis, bLength := b.widest(); bLength > length {
		axis, length = bAxis, bLength
		s, aFrom, aTo, a, t, bFrom, bTo, b = t, bFrom, bTo, b, s, aFrom, aTo, a
	}
	if !g.spend(splitCost*int(aTo-aFrom), s) {
		return true
	}
	// Neither half is empty: length > 0, as span2 > gap2, and lo ≤ cut < hi.
	cut := a.lo[axis] + length/2
	if cut >= a.hi[axis] {
		cut = a.lo[axis]
	}
	mid := aFrom
	for i := aFrom; i < aTo; i++ {
		if s.pts[i][axis] <= cut {
			s.swap(i, mid)
			mid++
		}
	}
	nearFrom, nearTo, farFrom, farTo := aFrom, mid, mid, aTo
	near, far := boxOf(s.pts[nearFrom:nearTo]), boxOf(s.pts[farFrom:farTo])
	if far.gap2(b) < near.gap2(b) {
		nearFrom, nearTo, farFrom, farTo = farFrom, farTo, nearFrom, nearTo
		near, far = far, near
	}
	return g.touch(s, nearFrom, nearTo, &near, t, bFrom, bTo, b) ||
		g.touch(s, farFrom, farTo, &far, t, bFrom, bTo, b)
}

// number gives the clusters their numbers, by their smallest core row, and
// returns how many there are.
func (g *grid) number() int {
	n := len(g.forest)
	g.label = slices.Grow(g.label[:0], n)[:n]
	// A root's label is at first the smallest row of its tree.
	for i := range g.label {
		g.label[i] = math.MaxInt32
	}
	c := int32(0)
	for _, s := range g.slabs {
		for i := range s.cores {
			r := g.root(c)
			g.label[r] = min(g.label[r], s.cores[i].first)
			c++
		}
	}
	var roots []int32
	for i, parent := range g.forest {
		if int(parent) == i {
			roots = append(roots, parent)
		}
	}
	slices.SortFunc(roots, func(a, b int32) int { return cmp.Compare(g.label[a], g.label[b]) })
	for number, r := range roots {
		g.label[r] = int32(number)
	}
	for i := range g.label {
		g.label[i] = g.label[g.root(int32(i))]
	}
	return len(roots)
}

// findBorders finds the core cells that the other points of slab i are in reach
// of. once says that the clusters are numbered and that this is final: then of
// each point only the cells of falling numbers are noted, the last being the
// lowest. Otherwise all are, since numbers change from step to step.
func (g *grid) findBorders(i int, once bool) {
	s := g.slabs[i]
	s.borders = s.borders[:0]
	w := g.walkFrom(i, true, false)
	var keys [atATime]uint64
	var cells [atATime]int32
	n := 0
	look := func() {
		w.fill(keys[:n])
		for k, c := range cells[:n] {
			if runs := w.found(k); len(runs) > 0 {
				for p := s.coreEnd[c]; p < s.from[c+1]; p++ {
					g.bordersOf(i, p, runs, once)
				}
			}
		}
		n = 0
	}
	for c, key := range s.keys {
		if s.coreEnd[c] == s.from[c+1] {
			continue
		}
		keys[n], cells[n] = key, int32(c)
		if n++; n == atATime {
			look()
		}
	}
	look()
}

// bordersOf notes the core cells among the runs that a point is in reach of.
func (g *grid) bordersOf(i int, p int32, runs []run, once bool) {
	s := g.slabs[i]
	pos := &s.pts[p]
	lowest := int32(math.MaxInt32)
	for _, r := range runs {
		t := g.slabs[r.slab]
		for b := r.from; b < r.to; b++ {
			c := &t.cores[b]
			if once && g.label[g.base[r.slab]+b] >= lowest || c.box.gapTo2(pos) > g.eps2 {
				continue
			}
			if g.near(s, pos, t.pts[c.from:c.to]) {
				s.borders = append(s.borders, borderPair{p, cellRef{r.slab - int32(i), b}})
				if once {
					lowest = g.label[g.base[r.slab]+b]
				}
			}
		}
	}
}

// near tells whether p is within eps of one of the points, in whose box's reach
// it is. Without a budget that will do.
func (g *grid) near(s *slab, p *point, pts []point) bool {
	if !g.spend(len(pts), s) {
		return true
	}
	for j := range pts {
		if dist2(p, &pts[j]) <= g.eps2 {
			return true
		}
	}
	return false
}

// labelsOf returns the label of each point of slab i, and whether it is core.
// What it returns is overwritten by the next call.
func (g *grid) labelsOf(i int) (labels []int32, core []bool) {
	s := g.slabs[i]
	n := len(s.pts)
	g.labels, g.core = slices.Grow(g.labels[:0], n)[:n], slices.Grow(g.core[:0], n)[:n]
	labels, core = g.labels, g.core
	for p := range labels {
		labels[p], core[p] = Noise, false
	}
	for c := range s.cores {
		label := g.label[g.base[i]+int32(c)]
		for p := s.cores[c].from; p < s.cores[c].to; p++ {
			labels[p], core[p] = label, true
		}
	}
	for _, b := range s.borders {
		label := g.label[g.base[i+int(b.of.slabs)]+b.of.cell]
		if l := &labels[b.point]; *l == Noise || label < *l {
			*l = label
		}
	}
	return labels, core
}
