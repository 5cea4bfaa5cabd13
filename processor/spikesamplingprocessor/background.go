package spikesamplingprocessor

import "slices"

// A partition's background is counted in slices of a sixth of the window and
// known for ten windows: with the defaults, 10 s and 10 min.
const (
	backgroundSlices = 60
	// backgroundWarm is the number of slices below which little is known, and
	// backgroundLeast that below which nothing is.
	backgroundWarm  = 6
	backgroundLeast = 3
)

// background knows how many lone spikes a partition has as a rule.
//
// What counts is what found no cluster, or an incident would be taken for the
// background that it has to stand out from. In the first minute after the start
// that rule would deceive: at first every spike of a busy partition is in one
// long cluster, and without background it stays so. Then spikes of clusters
// longer than a slice count too, and the median of the slices is taken, which a
// short incident does not change.
type background struct {
	counts [backgroundSlices]int32 // by slice number modulo backgroundSlices
	next   int64                   // the first slice not counted yet; slices count from the start
}

// warm tells whether the background of a slice is told from its incidents.
func warm(slice int64) bool { return slice >= backgroundWarm }

// put notes the number of spikes in the next slice.
func (b *background) put(n int) {
	b.counts[b.next%backgroundSlices] = int32(n)
	b.next++
	if b.next == backgroundWarm {
		// An incident among the first slices shall not last in the mean.
		m := median(b.counts[:backgroundWarm])
		for i := range b.counts[:backgroundWarm] {
			b.counts[i] = min(b.counts[i], m)
		}
	}
}

func median(x []int32) int32 {
	x = slices.Sorted(slices.Values(x))
	return x[(len(x)-1)/2]
}

// perSlice is the mean number of spikes in a slice.
func (b *background) perSlice() float64 {
	known := b.counts[:min(b.next, backgroundSlices)]
	switch {
	case len(known) < backgroundLeast:
		return 0
	case !warm(b.next):
		return float64(median(known))
	}
	sum := 0.0
	for _, n := range known {
		sum += float64(n)
	}
	return sum / float64(len(known))
}

// idle tells whether there was no spike in all that is known.
func (b *background) idle() bool { return b.counts == [backgroundSlices]int32{} }
