package dbscan

import (
	"errors"
	"fmt"
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
// Points may be added in any order of time and before the window reaches them.
// A Window is not safe for concurrent use.
type Window struct {
	dims       int
	width, eps float64
	minSamples int
	start      float64 // of the window of the last step; -Inf before the first
	end        float64

	ids    []uint64 // of the points in points, oldest insertion first
	points []float64

	// last is the labelling of the last step. It is still right while no point
	// has entered or left the window and min_samples is the same.
	last  Snapshot
	stale bool
}

// Snapshot is the labelling of one position of the window.
type Snapshot struct {
	// Points holds the points in the window, in the order they were added.
	Points []Labelled
	// Clusters is the number of clusters.
	Clusters int
}

// Labelled is what became of a point.
type Labelled struct {
	ID    uint64 // as given to Add
	Label int32  // 0 to Clusters-1, or Noise
	Core  bool
}

// NewWindow returns an empty window. width is in the scaled units of axis 0;
// the other arguments are those of Cluster. Bad arguments are reported by every
// Add and Step.
func NewWindow(dims int, width, eps float64, minSamples int) *Window {
	return &Window{
		dims: dims, width: width, eps: eps, minSamples: minSamples,
		start: math.Inf(-1), end: math.Inf(-1), stale: true,
	}
}

// SetMinSamples changes min_samples from the next step on. It refuses values
// below 1 and keeps the old one.
func (w *Window) SetMinSamples(minSamples int) error {
	if err := checkParams(w.dims, w.eps, minSamples); err != nil {
		return err
	}
	w.stale = w.stale || minSamples != w.minSamples
	w.minSamples = minSamples
	return nil
}

// Len returns the number of points held: those in the window of the last step
// and those that were added since or lie after it.
func (w *Window) Len() int { return len(w.ids) }

// Add puts a point at p, scaled, into the window. The id is the caller's; it is
// given back in snapshots and need not be unique. p is copied. A point that is
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
	w.stale = w.stale || p[0] < w.end // a late one
	w.ids = append(w.ids, id)
	w.points = append(w.points, p...)
	return nil
}

// Step moves the window's end to tEnd, forgets the points before the window and
// labels those in it as Cluster would label them in the order they were added.
// tEnd may not be less than at the last step. A step that no point enters or
// leaves costs next to nothing; any other clusters the whole window anew. A
// step longer than the width jumps over points, which are then never labelled.
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
	before := w.end
	w.start, w.end = tEnd-w.width, tEnd

	kept := 0
	for i, id := range w.ids {
		p := w.points[i*w.dims : (i+1)*w.dims]
		switch t := p[0]; {
		case t < w.start:
			w.stale = w.stale || t < before
			continue
		case t < w.end && t >= before:
			w.stale = true
		}
		w.ids[kept] = id
		copy(w.points[kept*w.dims:], p)
		kept++
	}
	w.ids, w.points = w.ids[:kept], w.points[:kept*w.dims]

	if w.stale {
		snap, err := w.label()
		if err != nil {
			return Snapshot{}, err
		}
		w.last, w.stale = snap, false
	}
	return Snapshot{Points: slices.Clone(w.last.Points), Clusters: w.last.Clusters}, nil
}

// label clusters the points in the window.
func (w *Window) label() (Snapshot, error) {
	in := make([]float64, 0, len(w.points))
	snap := Snapshot{Points: make([]Labelled, 0, len(w.ids))}
	for i, id := range w.ids {
		p := w.points[i*w.dims : (i+1)*w.dims]
		if p[0] < w.end {
			in = append(in, p...)
			snap.Points = append(snap.Points, Labelled{ID: id})
		}
	}
	res, err := Cluster(in, w.dims, w.eps, w.minSamples)
	if err != nil {
		return Snapshot{}, err
	}
	for i := range snap.Points {
		snap.Points[i].Label, snap.Points[i].Core = res.Labels[i], res.Core[i]
	}
	snap.Clusters = res.Clusters
	return snap, nil
}

func (w *Window) check() error {
	if !(w.width > 0 && finite(w.width)) { // NaN too
		return fmt.Errorf("%w: %v, must be a positive number", ErrWidth, w.width)
	}
	return checkParams(w.dims, w.eps, w.minSamples)
}
