// C++ exceptions across frames whose data is large: unwinding has to find its
// tables, run destructors in order and land in the right handler while the
// memory it walks through may be elsewhere.
//
//     exceptions [ROUNDS]
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

unsigned long destroyed;

struct Ballast {
	std::vector<unsigned> values;
	explicit Ballast(unsigned seed) : values(4096, seed) {}
	~Ballast() { destroyed += values.back() + 1; }
};

struct Refused : std::runtime_error {
	unsigned depth;
	Refused(unsigned at, const std::string &what)
		: std::runtime_error(what), depth(at) {}
};

unsigned descend(unsigned depth, unsigned limit)
{
	Ballast ballast(depth);

	if (depth == limit) {
		switch (limit % 4) {
		case 0: throw Refused(depth, "refused at " + std::to_string(depth));
		case 1: throw depth;
		case 2: std::vector<int>().at(depth); break;
		default: throw std::make_unique<std::string>("owned " + std::to_string(depth));
		}
	}
	try {
		return descend(depth + 1, limit) + 1;
	} catch (const Refused &refused) {
		if (depth % 7 == 0)
			throw Refused(depth, std::string(refused.what()) + "!");
		throw;
	}
}

std::string attempt(unsigned limit)
{
	try {
		return std::to_string(descend(0, limit));
	} catch (const Refused &refused) {
		return std::string(refused.what()) + " seen at " + std::to_string(refused.depth);
	} catch (unsigned depth) {
		return "number " + std::to_string(depth);
	} catch (const std::out_of_range &) {
		return "out of range";
	} catch (const std::unique_ptr<std::string> &text) {
		return *text;
	}
}

} // namespace

int main(int argc, char **argv)
{
	unsigned rounds = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 400;
	std::map<std::string, unsigned> seen;
	std::vector<std::unique_ptr<Ballast>> kept;

	for (unsigned round = 0; round < rounds; round++) {
		seen[attempt(round % 60)]++;
		kept.push_back(std::make_unique<Ballast>(round));
	}
	for (const auto &entry : seen)
		std::printf("%s: %u\n", entry.first.c_str(), entry.second);
	kept.clear();
	std::printf("destroyed %lu\n", destroyed);
	return 0;
}
