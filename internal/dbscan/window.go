package dbscan

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
)

// What Window.Add and Window.Step refuse besides what Cluster refuses.
var (
	// ErrExpired: the point lies before the window and could never be labelled.
	ErrExpired = errors.New("point is older than the window")
	// ErrWidth: the window's width is not a positive number.
	ErrWidth = errors.New("window width out of range")
	// ErrBackwards: the window was asked to move back in time.
	ErrBackwards = errors.New("window cannot move back")
)

// Window labels the points of a window that slides along axis 0, which is
// time. The window that ends at t holds the points with t-width ≤ time < t.
//
// A step looks anew only at what is near points that came or went, in time;
// see slabs.go. Points may be added in any order of time and before the window
// reaches them. A Window is not safe for concurrent use.
type Window struct {
	dims       int // of points, time included
	timeless   bool
	width, eps float64
	minSamples int
	start      float64 // of the window of the last step; -Inf before the first
	end        float64

	waiting points // added since the last step, or still after the window
	come    points // scratch
	nextRow int32  // rows count points in the order they were added
	slabs   *slabs // the points in the window,
	flat    *flat  // or here where they do not fit slabs
}

// Snapshot counts what a step found.
type Snapshot struct {
	Points   int // in the window
	Core     int
	Noise    int
	Clusters int
	// Approximate tells that some labels were found after the work budget was
	// spent; see Cluster.
	Approximate bool
}

// Labelled is what became of a point.
type Labelled struct {
	ID    uint64 // as given to Add
	Label int32  // 0 to Clusters-1, or Noise
	Core  bool
}

// points are points as they came.
type points struct {
	ids []uint64
	row []int32
	at  []float64 // coordinates, row by row
}

func (p *points) add(id uint64, row int32, at []float64) {
	p.ids, p.row, p.at = append(p.ids, id), append(p.row, row), append(p.at, at...)
}

func (p *points) reset() { p.ids, p.row, p.at = p.ids[:0], p.row[:0], p.at[:0] }

// NewWindow returns an empty window. width is in the scaled units of axis 0;
// the other arguments are those of Cluster. Bad arguments are reported by every
// Add and Step.
func NewWindow(dims int, width, eps float64, minSamples int) *Window {
	return &Window{
		dims: dims, width: width, eps: eps, minSamples: minSamples,
		start: math.Inf(-1), end: math.Inf(-1),
	}
}

// NewTimelessWindow returns a window whose points have a time, axis 0, that
// tells when they come and go but is no part of the distance: that is between
// the other axes, of which dims does not count time. Every step clusters the
// whole window.
func NewTimelessWindow(dims int, width, eps float64, minSamples int) *Window {
	w := NewWindow(dims+1, width, eps, minSamples)
	w.timeless = true
	return w
}

// SetMinSamples changes min_samples from the next step on, which then looks at
// the whole window. It refuses values below 1 and keeps the old one.
func (w *Window) SetMinSamples(minSamples int) error {
	if err := checkParams(w.axes(), w.eps, minSamples); err != nil {
		return err
	}
	w.minSamples = minSamples
	return nil
}

// axes is the number of axes that count in a distance.
func (w *Window) axes() int {
	if w.timeless {
		return w.dims - 1
	}
	return w.dims
}

// Len returns the number of points held: those in the window of the last step
// and those that were added since or lie after it.
func (w *Window) Len() int {
	n := len(w.waiting.ids)
	if w.slabs != nil {
		n += w.slabs.n
	}
	if w.flat != nil {
		n += len(w.flat.ids)
	}
	return n
}

// Add puts a point at p, scaled, into the window. The id is the caller's; it is
// given back with the label and need not be unique. p is copied. A point that is
// refused changes nothing.
func (w *Window) Add(id uint64, p []float64) error {
	if err := w.check(); err != nil {
		return err
	}
	if len(p) != w.dims {
		return fmt.Errorf("%w: point %d has %d, want %d", ErrDims, id, len(p), w.dims)
	}
	for k, x := range p {
		if !finite(x) {
			return fmt.Errorf("%w: point %d, axis %d is %v", ErrNotFinite, id, k, x)
		}
	}
	if p[0] < w.start {
		return fmt.Errorf("%w: point %d at %v, window starts at %v", ErrExpired, id, p[0], w.start)
	}
	if w.nextRow == math.MaxInt32 {
		if w.Len() >= math.MaxInt32/2 {
			return fmt.Errorf("%w: at most %d", ErrTooMany, math.MaxInt32/2)
		}
		w.renumber()
	}
	w.waiting.add(id, w.nextRow, p)
	w.nextRow++
	return nil
}

// Step moves the window's end to tEnd, forgets the points before the window and
// labels those in it as Cluster would label them in the order they were added.
// tEnd may not be less than at the last step. A step longer than the width jumps
// over points, which are then never labelled.
func (w *Window) Step(tEnd float64) (Snapshot, error) {
	if err := w.check(); err != nil {
		return Snapshot{}, err
	}
	if !finite(tEnd) {
		return Snapshot{}, fmt.Errorf("%w: end of window is %v", ErrNotFinite, tEnd)
	}
	if tEnd < w.end {
		return Snapshot{}, fmt.Errorf("%w: from %v to %v", ErrBackwards, w.end, tEnd)
	}
	w.start, w.end = tEnd-w.width, tEnd
	come := w.arrivals()

	if w.flat != nil {
		w.flat.expire(w.start, w.dims)
		w.flat.take(come, w.dims)
		// Points that do not fit may have gone.
		if !w.timeless {
			if s := slabsOf(&w.flat.points, w.dims, w.eps); s != nil {
				w.slabs, w.flat = s, nil
			}
		}
	} else {
		if w.slabs == nil && !w.timeless {
			w.slabs = newSlabs(w.dims, w.eps)
		}
		if w.timeless || !w.slabs.step(w.start, come) {
			w.moveOut(come)
		}
	}
	if w.flat != nil {
		return w.flat.label(w)
	}
	return w.slabs.label(w.minSamples), nil
}

// arrivals takes the points before the window's end out of those that wait.
func (w *Window) arrivals() *points {
	come := &w.come
	come.reset()
	stay := &w.waiting
	kept := 0
	for i, id := range stay.ids {
		p := stay.at[i*w.dims : (i+1)*w.dims]
		switch t := p[0]; {
		case t < w.start:
		case t < w.end:
			come.add(id, stay.row[i], p)
		default:
			stay.ids[kept], stay.row[kept] = id, stay.row[i]
			copy(stay.at[kept*w.dims:], p)
			kept++
		}
	}
	stay.ids, stay.row, stay.at = stay.ids[:kept], stay.row[:kept], stay.at[:kept*w.dims]
	return come
}

// moveOut makes the window flat: one of the points that come is too far from
// the others to be numbered in cells. The points may be few from now on, so new
// slabs are tried first.
func (w *Window) moveOut(come *points) {
	all := points{}
	if w.slabs != nil {
		w.slabs.points(&all)
	}
	for i, id := range come.ids {
		all.add(id, come.row[i], come.at[i*w.dims:(i+1)*w.dims])
	}
	w.slabs = nil
	if !w.timeless {
		if w.slabs = slabsOf(&all, w.dims, w.eps); w.slabs != nil {
			return
		}
	}
	w.flat = &flat{}
	w.flat.take(&all, w.dims)
}

// Labels gives the points of the last step's window with their labels, in no
// particular order but always the same for the same steps. It must not be used
// after a further Step, nor twice at a time.
func (w *Window) Labels() iter.Seq[Labelled] {
	return func(yield func(Labelled) bool) {
		switch {
		case w.flat != nil:
			for i, l := range w.flat.res.Labels {
				if !yield(Labelled{w.flat.ids[i], l, w.flat.res.Core[i]}) {
					return
				}
			}
		case w.slabs != nil:
			w.slabs.labels(yield)
		}
	}
}

// renumber makes rows count from 0 again.
func (w *Window) renumber() {
	var rows []*int32
	each := func(row []int32) {
		for i := range row {
			rows = append(rows, &row[i])
		}
	}
	each(w.waiting.row)
	if w.flat != nil {
		each(w.flat.row)
	}
	if w.slabs != nil {
		for _, s := range w.slabs.grid.slabs {
			each(s.row)
		}
	}
	slices.SortFunc(rows, func(a, b *int32) int { return cmp.Compare(*a, *b) })
	for i, r := range rows {
		*r = int32(i)
	}
	w.nextRow = int32(len(rows))
	if w.slabs != nil {
		for _, s := range w.slabs.grid.slabs {
			s.findFirst()
		}
	}
}

func (w *Window) check() error {
	if !(w.width > 0 && finite(w.width)) { // NaN too
		return fmt.Errorf("%w: %v, must be a positive number", ErrWidth, w.width)
	}
	return checkParams(w.axes(), w.eps, w.minSamples)
}

// flat holds the points of a window that has no slabs.
type flat struct {
	points
	res Result
}

// expire forgets the points before start.
func (f *flat) expire(start float64, dims int) {
	kept := 0
	for i, id := range f.ids {
		p := f.at[i*dims : (i+1)*dims]
		if p[0] < start {
			continue
		}
		f.ids[kept], f.row[kept] = id, f.row[i]
		copy(f.at[kept*dims:], p)
		kept++
	}
	f.ids, f.row, f.at = f.ids[:kept], f.row[:kept], f.at[:kept*dims]
}

// take adds points and brings all into the order in which they were added.
func (f *flat) take(come *points, dims int) {
	for i, id := range come.ids {
		f.add(id, come.row[i], come.at[i*dims:(i+1)*dims])
	}
	if slices.IsSorted(f.row) {
		return
	}
	order := make([]int, len(f.row))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(f.row[a], f.row[b]) })
	var sorted points
	for _, i := range order {
		sorted.add(f.ids[i], f.row[i], f.at[i*dims:(i+1)*dims])
	}
	f.points = sorted
}

// label clusters all points.
func (f *flat) label(w *Window) (Snapshot, error) {
	in := f.at
	if w.timeless {
		in = make([]float64, 0, len(f.ids)*w.axes())
		for i := range f.ids {
			in = append(in, f.at[i*w.dims+1:(i+1)*w.dims]...)
		}
	}
	res, err := Cluster(in, w.axes(), w.eps, w.minSamples)
	if err != nil {
		return Snapshot{}, err
	}
	f.res = res
	snap := Snapshot{Points: len(f.ids), Clusters: res.Clusters, Approximate: res.Approximate}
	for i, l := range res.Labels {
		if l == Noise {
			snap.Noise++
		}
		if res.Core[i] {
			snap.Core++
		}
	}
	return snap, nil
}
