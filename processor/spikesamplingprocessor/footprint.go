package spikesamplingprocessor

import "sort"

// classes are the sizes in which the runtime allocates small objects, found by
// asking it: append rounds up to them.
var classes = func() (sizes []int) {
	for n := 1; n <= largestClass; {
		c := cap(append([]byte(nil), make([]byte, n)...))
		sizes = append(sizes, c)
		n = c + 1
	}
	return sizes
}()

// Objects above the largest class are rounded up to whole pages.
const (
	largestClass = 32 << 10
	heapPage     = 8 << 10
)

// allocated returns what an object of n bytes takes of the heap.
func allocated(n int) int {
	switch {
	case n == 0:
		return 0
	case n > largestClass:
		return (n + heapPage - 1) / heapPage * heapPage
	default:
		return classes[sort.SearchInts(classes, n)]
	}
}
