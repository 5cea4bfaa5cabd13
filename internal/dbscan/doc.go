// Package dbscan finds density-based clusters, exactly: the answer is that of
// the textbook definition, to the letter and to the last tie. Only where input is
// made to defeat every short cut is the work cut short, and the answer says so.
// [Cluster] labels a set of points at once, [Window] labels the points
// of a window that slides along the first axis, which is time.
//
// # Definition
//
// A point is core when at least minSamples points, itself included, lie within
// eps of it; a distance of exactly eps is within. Two core points within eps of
// each other belong to one cluster. A point that is not core but within eps of
// a core point is a border point: it gets a label and passes it to nobody. All
// others are noise.
//
// Clusters are numbered from 0 in the order of their first core point in the
// input. A border point in reach of several clusters takes the smallest number.
// This is the numbering that a scan in input order gives, so labels can be
// compared with those of other exact implementations by equality.
//
// # How it is fast
//
// Points are sorted into cells so small that all points of a cell are within
// eps of each other. Most questions are then answered for a cell at once; see
// grid.go and cluster.go. The cells of one time are a slab, and what a window
// knows of a slab lasts from step to step; see slab.go and slabs.go.
package dbscan
