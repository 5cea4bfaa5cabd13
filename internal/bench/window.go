package main

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"

	"github.com/ebpfllm/ebpfllm/internal/dbscan"
	"github.com/ebpfllm/ebpfllm/internal/dbscan/dbscantest"
)

// measureWindow steps a window of 60 s that holds a million points by a second,
// 60 times, and clusters the points of every tenth step anew to compare. A step
// includes adding its points; reading all labels is measured apart.
func measureWindow(rep *report) error {
	const (
		name   = "dbscan window of 1e6 points, step of 1 s"
		n      = 1_000_000
		second = 2 // scaled: units of half a second
		width  = 60 * second
	)
	set := dbscantest.Make("W", n, 1)
	stream := make([][3]float64, n)
	for i := range stream {
		copy(stream[i][:], set.Points[3*i:])
	}
	slices.SortFunc(stream, func(p, q [3]float64) int { return cmp.Compare(p[0], q[0]) })

	w := dbscan.NewWindow(set.Dims, width, set.Eps, set.MinSamples)
	next := 0
	point := func(i int) [3]float64 { // the same minute over and over
		p := stream[i%n]
		p[0] += float64(i / n * width)
		return p
	}
	step := func(end float64) (dbscan.Snapshot, error) {
		for ; ; next++ {
			p := point(next)
			if p[0] >= end {
				return w.Step(end)
			}
			if err := w.Add(uint64(next), p[:]); err != nil {
				return dbscan.Snapshot{}, err
			}
		}
	}
	if _, err := step(width); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	runtime.GC()

	var ours, reading, full []float64
	for i := range 60 {
		end := float64(width + (i+1)*second)
		start := cpuTime()
		snap, err := step(end)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		ours = append(ours, float64((cpuTime()-start).Microseconds())/1e3)

		start = cpuTime()
		inClusters := 0
		for l := range w.Labels() {
			if l.Label != dbscan.Noise {
				inClusters++
			}
		}
		reading = append(reading, float64((cpuTime()-start).Microseconds())/1e3)
		if inClusters != snap.Points-snap.Noise {
			return fmt.Errorf("%s: the labels tell of %d points in clusters, the step of %d", name, inClusters, snap.Points-snap.Noise)
		}

		if i%10 > 0 {
			continue
		}
		first := next - snap.Points
		took, err := anew(w, first, next, point, set)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		full = append(full, took)
		runtime.GC()
	}
	theirs := row{Name: name, Subject: "full run", Value: median(full), Unit: "CPU ms"}
	mine := row{Name: name, Subject: "ebpfllm", Value: median(ours), Unit: "CPU ms", Note: "labels equal the full run's to the letter"}
	mine.compare(theirs, false)
	rep.Rows = append(rep.Rows, mine, theirs,
		row{Name: name + ", reading all labels", Subject: "ebpfllm", Value: median(reading), Unit: "CPU ms"})
	return nil
}

// anew clusters the points from first to next, of which the window must say the
// same, and returns the CPU time in milliseconds.
func anew(w *dbscan.Window, first, next int, point func(int) [3]float64, set dbscantest.Set) (float64, error) {
	all := make([]float64, 0, 3*(next-first))
	for j := first; j < next; j++ {
		p := point(j)
		all = append(all, p[:]...)
	}
	runtime.GC()
	start := cpuTime()
	res, err := dbscan.Cluster(all, set.Dims, set.Eps, set.MinSamples)
	if err != nil {
		return 0, err
	}
	took := cpuTime() - start
	for l := range w.Labels() {
		if j := int(l.ID) - first; l.Label != res.Labels[j] || l.Core != res.Core[j] {
			return 0, fmt.Errorf("point %d is (%d, %v) but (%d, %v) in a full run", l.ID, l.Label, l.Core, res.Labels[j], res.Core[j])
		}
	}
	return float64(took.Microseconds()) / 1e3, nil
}
